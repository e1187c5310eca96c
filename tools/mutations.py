"""Ways to break the scheduler, each of which the tests must notice. Run by ``tools/mutate.py``.

A mutation replaces `old`, which occurs exactly once in the file, by `new`. `tests` selects what must fail (pytest's
``-k``); left out, it is the tests named after the numbered behaviours.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # in hf_paged/scheduler/
    old: str
    new: str
    behaviours: tuple[int, ...] = ()
    tests: str = ""


POOL, MANAGER, BOOK = "block_pool.py", "kv_cache_manager.py", "scheduler.py"
SCHEDULER, TABLE, QUEUE = "scheduler.py", "sequence.py", "sequence.py"
PLAN, TREE, ROWS, GROUPS = "plan.py", "prefix_tree.py", "lockstep_rows.py", "prefix_tree.py"
DRAFTS = "plan.py"
STATES = "snapshots.py"

MUTATIONS = [
    Mutation(POOL, "OrderedDict.fromkeys(self.blocks[1:])", "OrderedDict.fromkeys(self.blocks)", (1,)),
    Mutation(POOL, 'assert block.ref_count > 0, f"{block} is freed', 'assert True, f"{block} is freed', (1,)),
    Mutation(MANAGER, "return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1", (2,)),
    Mutation(MANAGER, "range(seq.num_published, num_tokens // size)",
             "range(seq.num_published, self.num_blocks_for(num_tokens))", (2,)),
    Mutation(POOL, "xxhash.xxh64_digest(parent_digest + content)", "xxhash.xxh64_digest(content)", (3,)),
    Mutation(POOL, "block.content == content and block.parent_id == parent_id and block.generation >= ",
             "block.parent_id == parent_id and block.generation >= ", (3,)),
    Mutation(POOL, "block.content == content and block.parent_id == parent_id and block.generation >= ",
             "block.content == content and block.generation >= ", (3,)),
    Mutation(MANAGER, " + seq.block_key(i * size, (i + 1) * size)\n", "\n", (3,)),
    Mutation(MANAGER, "            content += seq.block_key(i * size, (i + 1) * size)\n", "", (3,)),
    Mutation(MANAGER, "            parent_id = block.prefix_id\n", "", (4,)),
    Mutation(MANAGER, """            if block is None:
                break
            hits.append(block)""", """            if block is None or hits:
                break
            hits.append(block)""", (4,)),
    Mutation(MANAGER, "self._hash_leading(seq, 2 * len(hits))", "pass", (4,)),
    Mutation(MANAGER, "min(len(hits) * self.block_size, num_tokens - 1)", "len(hits) * self.block_size", (5,)),
    Mutation(SCHEDULER, "write_from = max(start, seq.num_published * self.config.block_size)", "write_from = start",
             (5, 13)),
    Mutation(POOL, """            if block.ref_count == 0:
                del self.free_queue[block]
            block.ref_count += 1""", """            block.ref_count += 1""", (6,)),
    Mutation(MANAGER, "for i in reversed(seq.block_table)", "for i in seq.block_table", (7,)),
    Mutation(POOL, """        if block.digest is None:
            self.free_queue.move_to_end""", """        if False:
            self.free_queue.move_to_end""", (8,)),
    Mutation(POOL, """        if block.digest is None:
            self.free_queue.move_to_end""", """        if True:
            self.free_queue.move_to_end""", (8, 9)),
    Mutation(POOL, """            if block.digest is not None:
                self._forget(block)
            block.ref_count = 1""", """            block.ref_count = 1""", (9,)),
    Mutation(POOL, """                self.num_gains += 1
                self._queue(block)""", """                self.num_gains += 1
                if block.digest is not None:
                    self._forget(block)
                self._queue(block)""", (9,)),
    Mutation(POOL, "        if n > self.num_free:\n", "        if False:\n", (10,)),
    Mutation(MANAGER, "(self.block_pool.num_free - sum(block.ref_count == 0 for block in hits))",
             "self.block_pool.num_free", (10,)),
    Mutation(MANAGER, "(self.block_pool.num_free - sum(block.ref_count == 0 for block in hits))",
             "(self.block_pool.num_free - len(hits))", (10,)),
    Mutation(MANAGER, """            return None
        self.block_pool.touch(hits)""", """            self.block_pool.touch(hits)
            return None
        self.block_pool.touch(hits)""", (10,)),
    Mutation(POOL, "self.cached.setdefault(digest, {})[block.block_id] = block",
             "self.cached[digest] = {block.block_id: block}", (11,)),
    Mutation(POOL, "            block.prefix_id = twin.prefix_id\n",
             "            self._last_prefix_id += 1\n            block.prefix_id = self._last_prefix_id\n", (11,)),
    Mutation(SCHEDULER, "prefills.published += self.kv_cache_manager.publish(seq, table.tokens[slot], end)",
             "pass", (12,)),
    Mutation(SCHEDULER, "self.kv_cache_manager.publish(seq, table.tokens[slot], end)",
             "self.kv_cache_manager.publish(seq, table.tokens[slot], target)", (12,)),
    Mutation(SCHEDULER, "                self._publish_decoded(slots, end)\n", "                pass\n", (12,)),
    Mutation(SCHEDULER, "seq.num_published * self.config.block_size)", "0)", (13,)),
    Mutation(MANAGER, "        seq.block_table = []\n", "", (14,)),
    Mutation(BOOK, "        seq.detach(0)\n", "        seq.detach(seq.num_computed_tokens)\n", (14,)),
    Mutation(BOOK, "        seq.detach(0)\n", "        seq.detach(0)\n        seq._output = []\n", (14,)),
    Mutation(SCHEDULER, "self._preempt(max([seq", "self._preempt(min([seq", (14,)),
    Mutation(BOOK, """        seq.status = Status.WAITING
        self._waiting.push(seq)""", """        seq.status = Status.WAITING
        seq.arrival = self._num_arrived
        self._num_arrived += 1
        self._waiting.push(seq)""", (14,)),
    Mutation(TABLE, "self.known[slot] = self.target[slot] = len(token_ids)",
             "self.known[slot] = self.target[slot] = seq.num_prompt_tokens", (15,)),
    Mutation(MANAGER, "        seq.num_published = 0\n", "", (15,)),
    Mutation(MANAGER, "        seq.prefix_id = ROOT_PREFIX_ID\n", "", (14, 15)),
    Mutation(SCHEDULER, "                seq.append(token)\n", "                pass\n",
             tests="takes_in_its_token_in_flight"),
    Mutation(MANAGER, "if not self.enable_prefix_caching or seq.is_mixed:\n", "if seq.is_mixed:\n", (16,)),
    Mutation(MANAGER, "if not self.enable_prefix_caching or not seq.read_cache:\n", "if not seq.read_cache:\n", (16,)),
    Mutation(POOL, "        if self.num_free != self.num_blocks - 1:\n            return False\n", "", (17,)),
    Mutation(POOL, "        self.cached.clear()\n", "", (17,)),
    Mutation(SCHEDULER, """            for slot in np.flatnonzero(table.draining & (table.in_flight == 0)).tolist():
                self._retire(slot)""", """            pass""", (18,)),
    Mutation(BOOK, """            if not self._table.in_flight[slot]:
                self._retire(slot)""", """            pass""", (18,)),
    Mutation(MANAGER, "self.block_pool.free([blocks[i] for i in reversed(seq.block_table)])",
             "self.block_pool.free([blocks[i] for i in reversed(seq.block_table[1:])])", (18,)),
    Mutation(MANAGER, "if not self.enable_prefix_caching or not seq.read_cache:\n",
             "if not self.enable_prefix_caching:\n", (19,)),
    Mutation(MANAGER, "        size, pool = self.block_size, self.block_pool\n",
             "        if not seq.read_cache:\n            return []\n"
             "        size, pool = self.block_size, self.block_pool\n", (19,)),
    Mutation(MANAGER, "self.prefix_cache_hits += num_hit_tokens",
             "self.prefix_cache_hits += num_hit_tokens // self.block_size", (20,)),
    Mutation(MANAGER, "self.prefix_cache_queries += seq.num_tokens", "self.prefix_cache_queries += 1", (20,)),
    Mutation(SCHEDULER, "            if not seq.was_admitted:\n", "            if True:\n", (20,)),
    Mutation(POOL, "        self.trusted_from = self.generation\n", "", (21,)),
    Mutation(POOL, "        self.trusted_from = 0\n", "", (21,)),
    Mutation(POOL, "if block.generation < self.generation]", "if block.generation <= self.generation]", (21,)),
    Mutation(POOL, "        self.unpublish([block for block in self.blocks if block.generation < self.generation])\n",
             "        pass\n", (21,)),
    Mutation(POOL, "        block.generation = self.generation\n", "", (21,)),
    Mutation(BOOK, "            pool.unpublish(plan.published)\n", "", (22,)),
    Mutation(BOOK, "        for plan in self._in_flight:\n            pool.unpublish",
             "        for plan in list(self._in_flight)[1:]:\n            pool.unpublish", (22,)),
    Mutation(BOOK, "        self._in_flight.clear()\n", "", (22,)),
    Mutation(POOL, """            if block.ref_count == 0:
                self.free_queue.move_to_end(block, last=False)
""", "", (22,)),
    # What DESIGN.md says of a step without a number.
    Mutation(SCHEDULER, "if table.in_flight[slot] or not self._make_room_for(seq):",
             "if not self._make_room_for(seq):", tests="extra_token_preempts_nobody"),
    Mutation(SCHEDULER, "table.decoding[slots] = start + 2 < table.limit[slots]", "pass", tests="known_end"),
    Mutation(SCHEDULER, "done and end + 1 < int(table.limit[slot])", "done", tests="known_end"),
    Mutation(SCHEDULER, "        if not short:\n            self._admit", "        if True:\n            self._admit",
             tests="no_admission_in_a_step_that_preempted"),
    Mutation(SCHEDULER, "                    return  # it fits", "                    pass  # it fits",
             tests="nobody_overtakes"),
    Mutation(SCHEDULER, "        room = self.config.max_num_batched_tokens - len(slots) - ",
             "        room = self.config.max_num_batched_tokens - ", tests="decode_never_starves"),
    Mutation(SCHEDULER, "live = present & ~table.draining[slots]", "live = present",
             tests="abort_in_every_state or extra_token_is_dropped"),
    Mutation(SCHEDULER, "self.kv_cache_manager.unpublish(seq)", "pass", tests="invalid_logits"),
    Mutation(SCHEDULER, "            self._fail(seq)\n            return True", "            return False",
             tests="outgrows_the_pool"),
    Mutation(SCHEDULER, "if short and self.ask_for_blocks(missing):", "if False:", tests="pool_grows"),
    Mutation(SCHEDULER, """                if self.ask_for_blocks(missing):
                    continue
                if not table""", """                if not table""", tests="pool_grows"),
    # A prompt that waits is looked at when it may fit, and no sooner.
    Mutation(POOL, "                self.num_gains += 1\n", "", tests="looked_up_again or nobody_overtakes"),
    Mutation(SCHEDULER, "return self._short[2] - self.kv_cache_manager.block_pool.num_gains", "return 0",
             tests="looked_up_again"),
    Mutation(TABLE, "max(2 * columns, limit, len(token_ids))", "max(2 * columns, len(token_ids))",
             tests="comes_and_goes"),
    Mutation(TABLE, "np.zeros((num_slots, num_columns), np.int32)", "np.full((num_slots, num_columns), 0, np.int32)",
             tests="its_own_tokens_alone"),
    Mutation(SCHEDULER, "present = table.tenancy[slots] == plan.tenancy", "present = plan.tenancy >= 0",
             tests="takes_in_its_token_in_flight"),
    Mutation(QUEUE, "(seq.rank, seq))\n        self._len", "((0, seq.arrival), seq))\n        self._len",
             tests="priority"),
    Mutation(MANAGER, " or seq.is_mixed", "", (23,)),
    Mutation(MANAGER, "        seq.is_mixed = False  # what", "        pass  # what", (23,)),
    Mutation(SCHEDULER, "                seq.is_mixed = True\n", "                pass\n", (23,)),
    # Groups of rows that begin with the same blocks.
    Mutation(TREE, "            if table[node.end : inner.end] != inner.blocks:\n", "            if False:\n",
             tests="as_far_as_they_agree or any_set"),
    Mutation(TREE, "            if len(node.leaves) + len(node.inner) == 1:\n", "            if False:\n",
             tests="one_row_alone or any_set"),
    Mutation(TREE, "    node.parent, node.blocks = outer, blocks[count:]\n", "    node.parent = outer\n",
             tests="any_set"),
    Mutation(TREE, "inner.blocks = parent, node.blocks + inner.blocks", "inner.blocks = parent, inner.blocks",
             tests="any_set"),
    Mutation(TREE, "        self._forest = None\n        self._known.clear()\n", "        self._known.clear()\n",
             tests="one_row_alone or any_set"),
    Mutation(TREE, "        self._forest = None\n        self._known.clear()\n", "        self._forest = None\n",
             tests="a_change_is_seen"),
    Mutation(TREE, "if step not in self._known:\n            self._know(step, _among",
             "if True:\n            self._know(step, _among", tests="same_object"),
    Mutation(TREE, "    hidden[forest.parent[is_same]] = True\n", "", tests="many_levels or any_set"),
    Mutation(TREE, "    while hidden[around[keep]].any():\n", "    if hidden[around[keep]].any():\n",
             tests="many_levels"),
    Mutation(TREE, "    present &= np.repeat", "    _ = np.repeat", tests="any_set"),
    Mutation(TREE, "[::2] < groups.end).any()", "[::2] < 0).any()", tests="all_in_the_cache or chunk_shares"),
    Mutation(TREE, "members=rows[groups.members].astype(np.int32)", "members=groups.members", tests="reads_for_itself"),
    Mutation(ROWS, "self._tree.groups_ahead(self.slots, start) if num_new > 1 else None", "None", tests="drafts_share"),
    Mutation(PLAN, "self, **columns, sequences=", "self, **columns, prompt_groups=None, sequences=",
             tests="rows_in_front"),
    Mutation(TREE, "        if not self.is_kept:\n", "        if False:\n", tests="not_wanted"),
    Mutation(SCHEDULER, "        self.prefix_tree.extended()\n", "", tests="prompt_of_full_blocks"),
    Mutation(ROWS, "        self._tree.extended()\n", "", tests="prompt_of_full_blocks"),
    Mutation(ROWS, "                self._tree.add(seq.slot, seq.block_table)\n", "                pass\n",
             tests="forget_drafts"),
    Mutation(ROWS, "            self._tree.remove(int(self.slots[row]))\n", "            pass\n", tests="beams"),
    Mutation(SCHEDULER, "        self.prefix_tree.remove(slot)\n", "", (14,)),
    Mutation(PLAN, "None if tree is None else tree.groups(slots[:num_decode_rows])", "self.groups",
             tests="rows_in_front"),
    # Guesses at what follows.
    Mutation(DRAFTS, "found[row - 1] and before == plan.drafts[row]", "before == plan.drafts[row]",
             tests="comes_true_behind_a_wrong_one"),
    Mutation(DRAFTS, "right and before not in plan.sequences[row].eos_token_ids", "right",
             tests="end_among_the_guesses"),
    Mutation(SCHEDULER, "            table.scheduled[slots] = table.known[slots] - 1\n", "", tests="are_taken"),
    Mutation(SCHEDULER, "                table.decoding[slot] = False\n", "", tests="others_go_on"),
    Mutation(SCHEDULER, "min(room, int(table.limit[slot]) - position - 2)", "room", tests="beyond_the_last_token"),
    Mutation(SCHEDULER, "                    if len(needy) < num_free:\n", "                    if True:\n",
             tests="only_free_blocks"),
    Mutation(SCHEDULER, " -= plan.drafts is None or plan.drafts[row] < 0\n", " -= 1\n",
             tests="keeps_what_was_confirmed"),
    Mutation(SCHEDULER, "np.flatnonzero(samples & live)", "np.flatnonzero(plan.samples & live)",
             tests="are_taken or first_wrong_guess"),
    Mutation(SCHEDULER, "            room //= 2  # prompts go on beside guesses\n", "            pass\n",
             tests="leave_prompts_room"),
    Mutation(TREE, 'b"".join((b"+", slots', 'b"".join((slots', tests="copies_are_not"),
    Mutation(GROUPS, "has_own = (copies > 1) & (end > shared)", "has_own = copies > 1", tests="rows_of_one_sequence"),
    Mutation(POOL, "max(self.trusted_from, self._kept_from)", "self.trusted_from", tests="shorter_than_a_block"),
    Mutation(STATES, "seq.block_key(first, first + len(ids))", 'b""', tests="shorter_than_a_block"),
    Mutation(STATES, "ids.tobytes(), seq.block_key(", "ids.tobytes(), b'' if first else seq.block_key(",
             tests="found_by_what_was_fed"),
    Mutation(STATES, " and seq.chunk_end(start, cut) == cut]", "]", tests="sees_a_later_one"),
    Mutation(STATES, "if has_own else", "if start % self._size else", tests="block_of_the_row_alone"),
    Mutation(STATES, "else {shared, last}", "else {last}", tests="a_branch_is_saved"),
    Mutation(STATES, "            self._kept.move_to_end(snapshot)\n            has", "            has",
             tests="used_longest_ago"),
    Mutation(STATES, "            if block.digest is None:\n                return None\n", "", tests="invalid_logits"),
    Mutation(STATES, "if seq.is_mixed or not self.capacity:", "if not self.capacity:", tests="of_several_weights"),
    Mutation(STATES, "and (snapshot.position == last or not self._whole_prompts)", "", tests="whole_prompts"),
    Mutation(SCHEDULER, "                self.snapshots.drop(plan.states.saved())", "                pass",
             tests="failed_launch"),
    Mutation(SCHEDULER, ' and computed <= self._table.known[slot]', "", tests="in_flight_is_dropped"),
    Mutation(SCHEDULER, "            if self.config.whole_prompts and prefills.sequences and num_tokens - num_hit > "
             "prefills.room:\n                return\n", "", tests="whole_prompts"),
    Mutation(SCHEDULER, """        if self.snapshots is not None:
            self.snapshots.clear()
        return True""", "        return True", tests="a_reset_drops"),
]
