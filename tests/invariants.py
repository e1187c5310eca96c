"""Invariants that hold between two calls of a scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from hf_paged.scheduler.block_pool import NULL_BLOCK_ID, BlockPool
from hf_paged.scheduler.prefix_tree import Node, PrefixTree
from hf_paged.scheduler.scheduler import Scheduler
from hf_paged.scheduler.sequence import Status


def check_pool(pool: BlockPool, uses: Counter[int]) -> None:
    """Check that reference counts are `uses`, the queue has the unused blocks, and the map the published ones."""
    queued = [block.block_id for block in pool.free_queue]
    assert len(queued) == len(set(queued)) == pool.num_free
    assert NULL_BLOCK_ID not in queued
    assert not uses[NULL_BLOCK_ID]
    assert set(queued) == {block.block_id for block in pool.blocks[1:] if block.ref_count == 0}
    for block in pool.blocks:
        assert block.ref_count == uses[block.block_id], f"{block} has {uses[block.block_id]} users"
        assert (block.digest is not None) == (block.block_id in pool.cached.get(block.digest or b"", {})), block
    contents: dict[int, tuple[int, bytes]] = {}
    for digest, same in pool.cached.items():
        assert same, "an empty entry stays in the map"
        for block_id, block in same.items():
            assert pool.blocks[block_id] is block
            assert block.digest == digest
            assert contents.setdefault(block.prefix_id, (block.parent_id, block.content)) == (
                block.parent_id,
                block.content,
            ), f"two contents share prefix {block.prefix_id}"


def check_prefix_tree(tree: PrefixTree, tables: dict[int, list[int]]) -> None:
    """Check that the tree groups exactly these block tables, by slot, by their common leading blocks."""
    assert tree._tables.keys() == tree._node.keys() == tree._key.keys() == tables.keys()
    seen: list[int] = []
    left: list[tuple[Node, list[int]]] = [(tree._root, [])]
    for node, path in left:  # which grows
        assert node.end == len(path)
        assert node.parent is None or len(node.leaves) + len(node.inner) > 1, "a row shares what nobody else has"
        assert not node.leaves.keys() & node.inner.keys(), "two rows share more than the tree knows"
        for key, slot in node.leaves.items():
            table = tree._tables[slot]
            assert table is tables[slot]
            assert (tree._node[slot], tree._key[slot]) == (node, key)
            assert table[: node.end] == path, "a row is among others than its block table says"
            assert key == (table[node.end] if len(table) > node.end else -1 - slot)
            assert (slot in tree._open) == (key < 0)
            seen.append(slot)
        for key, inner in node.inner.items():
            assert inner.parent is node
            assert inner.blocks[0] == key
            left.append((inner, path + inner.blocks))
    assert sorted(seen) == sorted(tables)
    assert tree._open <= tables.keys()


def check(scheduler: Scheduler, lent: Seq[list[int]] = ()) -> None:
    """Check that pool, slots, queues and sequences agree; raises AssertionError.

    lent: Block tables of rows that the scheduler does not own (lockstep).
    """
    table, manager = scheduler._table, scheduler.kv_cache_manager
    size = scheduler.config.block_size
    tenants = table.tenants()
    tables = [*(seq.block_table for seq in tenants), *lent]
    check_pool(manager.block_pool, Counter(block_id for block_table in tables for block_id in block_table))
    assert manager.enable_prefix_caching or not manager.block_pool.cached
    tree = scheduler.prefix_tree
    held = {slot: block_table for slot, block_table in tree._tables.items() if table.sequences[slot] is None}
    if tree.is_kept:
        assert sorted(map(id, held.values())) == sorted(map(id, filter(None, lent)))
        check_prefix_tree(tree, held | {seq.slot: seq.block_table for seq in tenants})
    else:
        assert not tree._tables
    assert len(tenants) == table.num_tenants <= scheduler.config.max_num_seqs
    assert len(tenants) + table.num_free_slots + table.num_lent == table.num_slots

    named = Counter(name for plan in scheduler._in_flight for name in {seq.request_id for seq in plan.sequences})
    for slot, seq in enumerate(table.sequences):
        if seq is None:
            assert not table.decoding[slot]
            assert not table.draining[slot]
            assert not table.in_flight[slot]
            continue
        assert seq.slot == slot
        assert len(set(seq.block_table)) == len(seq.block_table)
        assert (seq.status is Status.FINISHED) == bool(table.draining[slot])
        assert table.capacity[slot] == len(seq.block_table) * size
        assert table.scheduled[slot] <= max(table.capacity[slot], table.target[slot])
        assert table.known[slot] <= table.limit[slot]
        assert table.scheduled[slot] < table.limit[slot]
        assert seq.num_published <= len(seq.block_table)
        if seq.status is Status.FINISHED:
            assert table.in_flight[slot], "a finished sequence keeps its slot without need"
            assert not table.decoding[slot]
            continue
        shared = tree._node[slot].end * size if tree.is_kept else 0
        assert not table.decoding[slot] or shared <= table.scheduled[slot], "a token is shared that is not computed"
        assert table.in_flight[slot] == named[seq.request_id]
        assert seq.num_tokens < table.limit[slot]
        assert table.decoding[slot] <= (table.scheduled[slot] >= table.target[slot])
        assert (seq is scheduler._partial) == bool(table.scheduled[slot] < table.target[slot])
        for i, block_id in enumerate(seq.block_table):
            block = manager.block_pool.blocks[block_id]
            # A block that other rows use, or may hit later, holds only tokens that will not be overwritten.
            assert block.ref_count == 1 or i < seq.num_published
            assert block.digest is None or i < seq.num_published

    waiting = 0
    for request_id, seq in scheduler._requests.items():
        assert seq.request_id == request_id
        assert seq.status is not Status.FINISHED
        if seq.status is Status.WAITING:
            waiting += 1
            assert seq.slot == -1
            assert not seq.block_table
            assert not seq.num_published
            assert seq.num_computed_tokens == 0
            assert seq.num_in_flight == named[seq.request_id]
        else:
            assert table.sequences[seq.slot] is seq
    assert waiting == scheduler.num_waiting
    if scheduler._short is not None and (seq := scheduler._short[0]).status is Status.WAITING:
        missing = manager.shortage(seq, seq.num_tokens, manager.get_computed_blocks(seq)[0])
        assert missing >= scheduler._least_missing(seq), "a sequence that fits is not looked at"
    if not scheduler._in_flight and not scheduler._requests and not lent:
        assert scheduler.num_free_blocks == scheduler.num_blocks - 1
