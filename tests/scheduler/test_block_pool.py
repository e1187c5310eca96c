import pytest

from hf_paged.scheduler import BlockPool, block_pool
from hf_paged.scheduler.block_pool import ROOT_DIGEST, ROOT_PREFIX_ID


def ids(blocks):
    return [block.block_id for block in blocks]


def publish(pool, blocks, contents):
    """Publish blocks as one chain; contents are bytes."""
    digest, parent = ROOT_DIGEST, ROOT_PREFIX_ID
    for block, content in zip(blocks, contents, strict=True):
        digest = block_pool.hash_block(digest, content)
        parent = pool.publish(block, digest, content, parent)


def find(pool, contents):
    """The longest cached chain with these contents, as block ids."""
    digest, parent, found = ROOT_DIGEST, ROOT_PREFIX_ID, []
    for content in contents:
        digest = block_pool.hash_block(digest, content)
        block = pool.lookup(digest, content, parent)
        if block is None:
            break
        parent = block.prefix_id
        found.append(block.block_id)
    return found


def test_b01_null_block_is_never_allocated_freed_or_counted():
    pool = BlockPool(4)
    assert (pool.num_blocks, pool.num_free) == (4, 3)
    assert sorted(ids(pool.allocate(3))) == [1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    with pytest.raises(AssertionError, match="nobody uses it"):
        pool.free([pool.blocks[0]])
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)


def test_b03_equal_tokens_after_different_prefixes_hash_differently():
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    publish(pool, first, [b"aa", b"xx"])
    publish(pool, second, [b"bb", b"xx"])
    assert first[1].digest != second[1].digest
    assert find(pool, [b"aa", b"xx"]) == ids(first)
    assert find(pool, [b"bb", b"xx"]) == ids(second)
    assert find(pool, [b"xx"]) == []


def test_b03_a_hash_match_alone_is_never_trusted(monkeypatch):
    monkeypatch.setattr(block_pool, "hash_block", lambda parent_digest, content: b"same")
    pool = BlockPool(16)
    chains = [[b"aa", b"xx", b"yy"], [b"bb", b"xx", b"yy"], [b"xx", b"yy", b"aa"]]
    held = [pool.allocate(3) for _ in chains]
    for blocks, contents in zip(held, chains, strict=True):
        publish(pool, blocks, contents)
    for blocks, contents in zip(held, chains, strict=True):
        assert find(pool, contents) == ids(blocks)
    assert find(pool, [b"aa", b"yy"]) == ids(held[0][:1])
    assert find(pool, [b"yy"]) == []


def test_b06_a_hit_on_a_free_block_takes_it_out_of_the_free_queue():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    publish(pool, blocks, [b"aa", b"bb"])
    pool.free(reversed(blocks))
    assert pool.num_free == 3
    pool.touch(blocks)
    assert pool.num_free == 1
    assert not set(ids(pool.free_queue)) & set(ids(blocks))
    pool.touch(blocks[:1])
    assert [block.ref_count for block in blocks] == [2, 1]
    pool.free(blocks[:1])
    assert pool.num_free == 1  # still in use by the other


def test_b08_freed_blocks_without_a_hash_are_reused_first():
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    publish(pool, blocks[:2], [b"aa", b"bb"])
    pool.free(blocks)
    assert set(ids(pool.allocate(3))) == set(ids(blocks[2:]))
    assert find(pool, [b"aa", b"bb"]) == ids(blocks[:2])


def test_b09_eviction_happens_only_when_a_block_is_taken_and_then_its_hash_leaves_the_map():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    publish(pool, blocks, [b"aa", b"bb", b"cc"])
    pool.free(reversed(blocks))
    assert find(pool, [b"aa", b"bb", b"cc"]) == ids(blocks)  # being free evicts nothing
    (taken,) = pool.allocate(1)
    assert taken is blocks[2]
    assert taken.digest is None
    assert find(pool, [b"aa", b"bb", b"cc"]) == ids(blocks[:2])
    assert len(pool.cached) == 2


def test_b09_least_recently_used_goes_first():
    pool = BlockPool(4)
    a, b, c = (pool.allocate(1) for _ in range(3))
    for blocks, content in ((a, b"aa"), (b, b"bb"), (c, b"cc")):
        publish(pool, blocks, [content])
        pool.free(blocks)
    pool.touch(a)
    pool.free(a)
    assert ids(pool.allocate(2)) == ids(b + c)
    assert find(pool, [b"aa"]) == ids(a)


def test_b10_an_allocation_that_cannot_be_met_changes_nothing():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    publish(pool, blocks, [b"aa", b"bb"])
    pool.free(reversed(blocks))
    before = ids(pool.free_queue)
    with pytest.raises(ValueError):
        pool.allocate(4)
    assert ids(pool.free_queue) == before
    assert find(pool, [b"aa", b"bb"]) == ids(blocks)


def test_b11_equal_content_keeps_two_blocks_both_findable():
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    publish(pool, first, [b"aa", b"bb"])
    publish(pool, second, [b"aa", b"bb"])
    assert [len(same) for same in pool.cached.values()] == [2, 2]
    assert first[0].prefix_id == second[0].prefix_id
    assert first[1].prefix_id == second[1].prefix_id
    pool.unpublish(first)
    assert find(pool, [b"aa", b"bb"]) == ids(second)
    third = pool.allocate(2)
    publish(pool, third, [b"aa", b"bb"])
    pool.unpublish(second)
    assert find(pool, [b"aa", b"bb"]) == ids(third)
    pool.unpublish(third)
    assert not pool.cached


def test_a_prefix_that_was_dropped_does_not_lend_its_children_to_an_equal_one():
    pool = BlockPool(8)
    old = pool.allocate(2)
    publish(pool, old, [b"aa", b"bb"])
    pool.unpublish(old[:1])
    new = pool.allocate(1)
    publish(pool, new, [b"aa"])
    assert find(pool, [b"aa", b"bb"]) == ids(new)


def test_b17_reset_works_only_when_nothing_is_in_use():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    publish(pool, blocks, [b"aa", b"bb"])
    pool.free(blocks[1:])
    assert not pool.reset()
    assert find(pool, [b"aa", b"bb"]) == ids(blocks)
    pool.free(blocks[:1])
    assert pool.reset()
    assert find(pool, [b"aa"]) == []
    assert not pool.cached
    assert len(pool.allocate(3)) == 3


def test_b21_older_generations_are_not_hit_until_trusted():
    pool = BlockPool(8)
    old = pool.allocate(2)
    publish(pool, old, [b"aa", b"bb"])
    pool.new_generation()
    assert find(pool, [b"aa"]) == []
    assert pool.has_untrusted(old[0].digest, b"aa", ROOT_PREFIX_ID)
    pool.trust_older()
    assert find(pool, [b"aa", b"bb"]) == ids(old)
    assert not pool.has_untrusted(old[0].digest, b"aa", ROOT_PREFIX_ID)
    pool.new_generation()
    assert find(pool, [b"aa"]) == []  # trust does not outlive a generation


def test_b21_dropping_older_generations_keeps_the_newest_and_frees_nothing_in_use():
    pool = BlockPool(8)
    used, free = pool.allocate(1), pool.allocate(1)
    publish(pool, used, [b"aa"])
    publish(pool, free, [b"bb"])
    pool.free(free)
    pool.new_generation()
    new = pool.allocate(1)
    publish(pool, new, [b"cc"])
    pool.drop_older()
    pool.trust_older()
    assert find(pool, [b"aa"]) == find(pool, [b"bb"]) == []
    assert find(pool, [b"cc"]) == ids(new)
    assert used[0].ref_count == 1
    assert used[0].block_id not in ids(pool.free_queue)


def test_b21_a_block_made_under_unproven_kv_does_not_extend_an_equal_new_one():
    pool = BlockPool(8)
    old = pool.allocate(2)
    publish(pool, old[:1], [b"aa"])
    pool.new_generation()
    new = pool.allocate(1)
    publish(pool, new, [b"aa"])
    # A sequence that still runs on the old block publishes its next one.
    digest = block_pool.hash_block(old[0].digest, b"bb")
    pool.publish(old[1], digest, b"bb", old[0].prefix_id)
    assert find(pool, [b"aa", b"bb"]) == ids(new)


def test_b22_unpublished_blocks_are_not_found_and_are_reused_first():
    pool = BlockPool(6)
    kept, undone = pool.allocate(2), pool.allocate(2)
    publish(pool, kept, [b"aa", b"bb"])
    publish(pool, undone, [b"cc", b"dd"])
    pool.free(kept)
    pool.free(undone)
    pool.unpublish(undone)
    assert find(pool, [b"cc"]) == []
    assert set(ids(pool.allocate(2))) == set(ids(undone))
    pool.unpublish(undone)  # no longer in the cache: nothing to do


def test_grow_adds_free_blocks_used_before_cached_ones_and_never_shrinks():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    publish(pool, blocks, [b"aa", b"bb"])
    pool.free(blocks)
    pool.grow(5)
    pool.grow(2)
    assert (pool.num_blocks, pool.num_free) == (5, 4)
    assert ids(pool.allocate(2)) == [3, 4]
    assert find(pool, [b"aa", b"bb"]) == ids(blocks)
