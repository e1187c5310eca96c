"""A deterministic stand-in for model and runner that really lives off the paged memory.

The "KV" of a position depends on its token and on the KV of every position before it, read back through the block
table that the plans uploaded. A wrong block table, a lost or a misplaced write, or a stale block changes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import invariants
import numpy as np
from brute_groups import check_plan

from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence, Status, StepPlan, block_pool


def abort(scheduler: Scheduler, request_id: str) -> Sequence | None:
    """End a request by its id; None where no unfinished one has it."""
    seq = scheduler._requests.get(request_id)
    if seq is not None:
        scheduler.finish(seq, "abort")
    return seq

VOCAB = 97
MASK = (1 << 63) - 1


def kv_of(token: int, position: int, before: list[int], weights: int) -> int:
    value = (token + 1) * 1_000_003 + position * 7_919 + weights * 104_729
    for i, x in enumerate(before):
        value = (value * 31 + x * (2 * i + 1)) & MASK
    return value


class FakeModel:
    """Runs plans at once, in the order they are launched, as a device would."""

    def __init__(self, config: SchedulerConfig, vocab: int = VOCAB) -> None:
        self.config = config
        self.vocab = vocab
        self.weights = 0
        self.memory = np.full((config.num_blocks, config.block_size), -1, np.int64)
        self.tables: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self.tokens: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self.scheduler: Scheduler | None = None
        self.fail_next = False
        self.bad_requests: set[str] = set()
        self.guessed: set[int] = set()  # slots whose last step had drafts
        self.num_launched = 0

    def grow(self, num_blocks: int) -> None:
        extra = num_blocks - len(self.memory)
        if extra > 0:
            self.memory = np.pad(self.memory, ((0, extra), (0, 0)), constant_values=-1)

    def launch(self, plan: StepPlan) -> np.ndarray:
        """Returns the sampled tokens [R], -7 where the plan samples none."""
        size, scheduler = self.config.block_size, self.scheduler
        assert scheduler is not None
        drafts = np.full(len(plan.slots), -1) if plan.drafts is None else plan.drafts
        assert len(set(plan.slots.tolist())) == (drafts < 0).sum()
        for seq in plan.admitted:
            self.guessed.discard(seq.slot)
            self.tables[seq.slot] = list(seq.block_table)
            self.tokens[seq.slot] = seq.token_ids
        for slot, column, block_id in zip(*(a.tolist() for a in plan.block_updates), strict=True):
            assert column == len(self.tables[slot])
            self.tables[slot].append(block_id)
        if self.fail_next:
            self._scribble(plan)
            self.fail_next = False
            raise LaunchError
        self.num_launched += 1
        out = np.full(len(plan.sequences), -7, np.int64)
        for row in range(plan.num_decode_rows):  # what a step before guessed and computed behind is overwritten
            slot, start, tokens = int(plan.slots[row]), int(plan.start[row]), self.tokens[int(plan.slots[row])]
            if drafts[row] < 0 and slot in self.guessed:
                self.guessed.remove(slot)
                del tokens[start + 1 :]
            elif drafts[row] >= 0:
                assert (plan.slots[row - 1], plan.start[row - 1]) == (slot, start - 1)
                assert start == len(tokens)
                tokens.append(int(drafts[row]))
        self.guessed |= {int(slot) for slot in plan.slots[drafts >= 0]}
        known = [len(tokens) for tokens in self.tokens]
        promised = {block.block_id for block in plan.published}
        written: set[tuple[int, int]] = set()
        for row, seq in enumerate(plan.sequences):
            slot, start, count = int(plan.slots[row]), int(plan.start[row]), int(plan.num_new_tokens[row])
            table, tokens = self.tables[slot], self.tokens[slot]
            is_lent = scheduler._table.sequences[slot] is None  # of somebody who picks the tokens himself
            assert is_lent or seq.status is Status.RUNNING
            assert seq.slot == slot
            assert table == seq.block_table
            if row < plan.num_decode_rows:
                assert count == 1
                assert start == known[slot] - 1 or slot in self.guessed
            assert start + count <= known[slot]
            kv = [int(self.memory[table[p // size], p % size]) for p in range(start)]
            for p in range(start, start + count):
                value = kv_of(tokens[p], p, kv, self.weights)
                kv.append(value)
                block = scheduler.kv_cache_manager.block_pool.blocks[table[p // size]]
                if p >= plan.write_from[row]:
                    # Shared and cached blocks are read-only, but for the one plan that promised to fill them.
                    assert block.block_id in promised or (block.digest is None and block.ref_count == 1)
                    assert block.block_id != 0
                    assert (block.block_id, p % size) not in written
                    written.add((block.block_id, p % size))
                    self.memory[block.block_id, p % size] = value
                else:
                    assert int(self.memory[block.block_id, p % size]) == value
            is_last = start + count == known[slot] or (row < plan.num_decode_rows and slot in self.guessed)
            assert plan.samples[row] == is_last or (is_lent and row < plan.num_decode_rows)
            if is_last:
                token = kv[-1] % self.vocab
                tokens[start + count : start + count + 1] = [token]
                out[row] = -1 if seq.request_id in self.bad_requests else token
        self._check_shared(plan, {block for block, _ in written})
        return out

    def _check_shared(self, plan: StepPlan, written: set[int]) -> None:
        """What decode rows read together was there before the step, and what prompts do is there after it."""
        size = self.config.block_size
        for first_row, groups in ((0, plan.groups), (plan.num_decode_rows, plan.prompt_groups)):
            if groups is None:
                continue
            for first, begin, end in zip(*(x.tolist() for x in (groups.first, groups.begin, groups.end)), strict=True):
                slot = int(plan.slots[first_row + groups.members[first]])
                shared = self.tables[slot][begin // size : end // size]
                assert shared
                if groups is plan.groups:
                    assert not written & set(shared)
                else:  # what one prompt reads, another may have written in this step
                    assert (self.memory[shared] != -1).all()

    def _scribble(self, plan: StepPlan) -> None:
        """A launch that fails may have written anything where it was allowed to."""
        size = self.config.block_size
        for row in range(len(plan.sequences)):
            table = self.tables[int(plan.slots[row])]
            for p in range(int(plan.write_from[row]), int(plan.start[row] + plan.num_new_tokens[row])):
                self.memory[table[p // size], p % size] = -99


class LaunchError(Exception):
    """A launch that raised."""


def alone(seq: Sequence, max_model_len: int, vocab: int = VOCAB, weights: int = 0) -> tuple[list[int], str]:
    """Output and finish reason of the sequence with nobody else around and all the memory it wants."""
    tokens = seq.prompt_token_ids
    kv: list[int] = []
    for p, token in enumerate(tokens):
        kv.append(kv_of(token, p, kv, weights))
    output: list[int] = []
    while True:
        token = kv[-1] % vocab
        kv.append(kv_of(token, len(kv), kv, weights))
        output.append(token)
        if token in seq.eos_token_ids:
            return output, "eos"
        if len(output) == seq.max_new_tokens or len(kv) == max_model_len:
            return output, "length"


class Driver:
    """The engine's loop around a scheduler and a fake model, with or without one step of overlap."""

    def __init__(self, config: SchedulerConfig, *, overlap: bool = False, max_blocks: int = 0, vocab: int = VOCAB):
        self.config = config
        self.overlap = overlap
        self.max_blocks = max_blocks
        self.asked: list[int] = []
        self.model = FakeModel(config, vocab)
        self.scheduler = Scheduler(config, self._on_shortage if max_blocks else None)
        self.model.scheduler = self.scheduler
        self.pending: tuple[StepPlan, np.ndarray] | None = None
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []
        self.num_steps = 0
        self.spans_change: set[str] = set()  # request ids of sequences during which the weights changed
        self.lent = list  # block tables of rows that are none of the scheduler's
        self.joining: Callable[[], list[StepPlan]] = list  # their decode rows, which take the same steps
        self.give_back = lambda: None  # what becomes of them where a launch raises
        self.draft: Callable[[Sequence], list[int]] | None = None  # guesses at what follows its tokens

    def _on_shortage(self, missing: int) -> int:
        assert missing > 0
        self.asked.append(missing)
        total = min(self.scheduler.num_blocks + missing, self.max_blocks)
        self.model.grow(total)
        return max(total, self.scheduler.num_blocks)

    def add(self, request_id: str, prompt: list[int], max_new_tokens: int = 8, **kwargs) -> Sequence:
        seq = Sequence(request_id, prompt, max_new_tokens=max_new_tokens, **kwargs)
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan | None:
        """Schedule and launch a step; commit it, or with overlap the one before it."""
        self.num_steps += 1
        assert self.num_steps < 5000, "no progress"
        joining = self.joining()
        drafts: dict[int, list[int]] = {}
        if self.draft is not None:
            self.drain()
            running = [seq for seq in self.scheduler._table.tenants() if self.scheduler._table.decoding[seq.slot]]
            drafts = {seq.slot: self.draft(seq) for seq in running}
        plan = self.scheduler.schedule(drafts)
        for seq in self.scheduler.take_failed():
            assert seq.finish_reason == "error"
            needed = -(-seq.num_tokens // self.config.block_size)
            assert needed > max(self.scheduler.num_blocks, self.max_blocks) - 1, "it would have fitted alone"
            assert joining or not self.lent(), "others would have given their blocks back"
            self.finished.append(seq)
        invariants.check(self.scheduler, self.lent())
        launched = None
        if plan is not None:
            check_plan(plan, self.config.block_size)
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            self.plans.append(plan)
        if plan is not None or joining:
            # As the engine core does it.
            joined = joining[-1].behind(joining[:-1]) if plan is None else plan.behind(joining)
            check_plan(joined, self.config.block_size)
            try:
                tokens = self.model.launch(joined)
            except LaunchError:
                self.give_back()
                if plan is None:
                    return None
                if self.num_steps % 2:  # the older step may be taken in first, or be dropped as well
                    self.drain()
                self.scheduler.rollback(plan)
                self.pending = None
                invariants.check(self.scheduler, self.lent())
                return plan
            launched = None if plan is None else (plan, tokens[len(tokens) - len(plan.slots) :])
        if not self.overlap and launched is not None:
            self.commit(*launched)
        else:
            self.drain()
            self.pending = launched
        return plan

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> None:
        before = {id(seq): seq.num_output_tokens for seq in plan.sequences}
        result = self.scheduler.commit(plan, tokens)
        invariants.check(self.scheduler, self.lent())
        assert result.accepted.tolist() == sorted(set(result.accepted.tolist()))
        taken: dict[int, list[int]] = {id(seq): [] for seq in plan.sequences}
        for row in result.accepted.tolist():
            assert plan.samples[row]
            taken[id(plan.sequences[row])].append(int(tokens[row]))
        for seq in plan.sequences:
            assert seq.output_token_ids[before[id(seq)] :] == taken[id(seq)]
        assert all(seq.status is Status.FINISHED for seq in result.finished)
        self.finished += result.finished

    def drain(self) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.commit(*pending)

    def run(self) -> None:
        """Until nothing is left; then all blocks must be free."""
        while (self.scheduler.num_waiting + self.scheduler.num_running):
            self.step()
        self.drain()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks - 1
        assert all(block.ref_count == 0 for block in self.scheduler.kv_cache_manager.block_pool.blocks)

    def check_findable(self) -> None:
        """Every block that a prompt could hit holds what the weights of now compute for it."""
        pool, size = self.scheduler.kv_cache_manager.block_pool, self.config.block_size
        followers: dict[int, list[block_pool.KVBlock]] = {}
        for same in pool.cached.values():
            for block in same.values():
                if block.generation >= pool.trusted_from:
                    followers.setdefault(block.parent_id, []).append(block)
        prefixes: list[tuple[int, list[int]]] = [(block_pool.ROOT_PREFIX_ID, [])]
        for parent, kv in prefixes:  # which grows
            reached = set()
            for block in followers.get(parent, []):
                longer = list(kv)
                for token in np.frombuffer(block.content[: 4 * size], np.int32).tolist():
                    longer.append(kv_of(token, len(longer), longer, self.model.weights))
                assert self.model.memory[block.block_id].tolist() == longer[-size:], f"{block} is of other weights"
                if block.prefix_id not in reached:
                    reached.add(block.prefix_id)
                    prefixes.append((block.prefix_id, longer))

    def check_output(self, seq: Sequence) -> None:
        assert seq.status is Status.FINISHED
        assert seq.token_ids == seq.prompt_token_ids + seq.output_token_ids
        if seq.request_id in self.spans_change:  # of which weights each token is, tests of the engine know
            return
        output, reason = alone(seq, self.config.max_model_len, self.model.vocab, self.model.weights)
        if seq.finish_reason in ("eos", "length"):
            assert seq.output_token_ids == output
            assert seq.finish_reason == reason
        else:  # ended before its time
            assert seq.output_token_ids == output[: seq.num_output_tokens]


def config(**changes) -> SchedulerConfig:
    """Small sizes, with changes."""
    sizes = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(sizes | changes))


class Spans:
    """What is fed of a prompt whose tokens of a span see each other."""

    def __init__(self, *spans):
        self.places = [place for place in range(1, 100) if not any(first < place < end for first, end in spans)]

    def chunk_end(self, first, end):
        behind = [place for place in self.places if place > first]
        return max([place for place in behind if place <= end], default=behind[0])

    def block_key(self, first, end):
        return b"span" if end not in self.places or first not in (0, *self.places) else b""
