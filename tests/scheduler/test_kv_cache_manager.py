import numpy as np
import pytest

from hf_paged.scheduler import KVCacheManager, SchedulerConfig, Sequence, block_pool


def manager(num_blocks=17, block_size=4, caching=True, max_model_len=64):
    return KVCacheManager(SchedulerConfig(block_size, num_blocks, 4, 32, max_model_len, caching))


def sequence(tokens, **kwargs):
    return Sequence("r", list(tokens), max_new_tokens=8, **kwargs)


def start(kv, tokens, **kwargs):
    """Admit a sequence as the scheduler does and publish its prompt."""
    seq = sequence(tokens, **kwargs)
    hits, num_hit = kv.get_computed_blocks(seq)
    assert kv.allocate_slots(seq, seq.num_tokens, hits) is not None
    kv.count_hit(seq, num_hit)
    kv.publish(seq, np.array(seq.token_ids, np.int32), seq.num_tokens)
    return seq


def hit(kv, tokens, **kwargs):
    blocks, num_tokens = kv.get_computed_blocks(sequence(tokens, **kwargs))
    return [block.block_id for block in blocks], num_tokens


@pytest.mark.parametrize(("num_tokens", "blocks", "full"), [(1, 1, 0), (3, 1, 0), (4, 1, 1), (5, 2, 1), (8, 2, 2)])
def test_b02_n_tokens_take_ceil_n_over_b_blocks_and_only_full_ones_are_hashed(num_tokens, blocks, full):
    kv = manager()
    seq = start(kv, range(num_tokens))
    assert len(seq.block_table) == blocks
    assert [kv.block_pool.blocks[i].digest is not None for i in seq.block_table] == [i < full for i in range(blocks)]
    assert seq.num_published == full


def test_b03_the_cache_key_separates_equal_prompts():
    kv = manager()
    plain = start(kv, range(9))
    adapter = start(kv, range(9), cache_key=b"adapter")
    assert adapter.num_cached_tokens == 0
    assert not set(plain.block_table) & set(adapter.block_table)
    assert hit(kv, range(9)) == (plain.block_table[:2], 8)
    assert hit(kv, range(9), cache_key=b"adapter") == (adapter.block_table[:2], 8)
    assert hit(kv, range(9), cache_key=b"other") == ([], 0)


class Fed:
    """What is fed of a prompt of blocks of 4: a key for each block."""

    def __init__(self, *keys):
        self._keys = keys

    def block_key(self, first, end):
        return self._keys[first // 4] if end // 4 <= len(self._keys) else b""

    def chunk_end(self, first, end):
        return end


def test_b03_what_is_fed_separates_equal_prompts():
    kv = manager()
    text = start(kv, range(9))
    image = start(kv, range(9), fed=Fed(b"", b"1"))
    assert image.num_cached_tokens == 4 and hit(kv, range(9)) == (text.block_table[:2], 8)
    assert hit(kv, range(9), fed=Fed(b"", b"1")) == (image.block_table[:2], 8)
    for other in (Fed(b"", b"2"), Fed(b"1", b"1"), Fed(b"1")):
        assert hit(kv, range(9), fed=other)[1] == (4 if other.block_key(0, 4) == b"" else 0)
    assert start(kv, range(9), fed=Fed(b"1"), cache_key=b"k").num_cached_tokens == 0
    kv.block_pool.new_generation()
    assert kv.has_older_hit(range(8), image.block_key(0, 4))
    assert not kv.has_older_hit(range(8), sequence(range(9), fed=Fed(b"2")).block_key(0, 4))


def test_b03_nothing_goes_wrong_when_every_hash_is_the_same(monkeypatch):
    monkeypatch.setattr(block_pool, "hash_block", lambda parent_digest, content: b"same")
    kv = manager()
    a = start(kv, [1] * 4 + [2] * 4 + [9])
    b = start(kv, [3] * 4 + [2] * 4 + [9])
    c = start(kv, [1] * 4 + [2] * 4 + [9], cache_key=b"k")
    assert len({*a.block_table, *b.block_table, *c.block_table}) == 9
    assert hit(kv, [1] * 4 + [2] * 4 + [5]) == (a.block_table[:2], 8)
    assert hit(kv, [3] * 4 + [2] * 4 + [5]) == (b.block_table[:2], 8)
    assert hit(kv, [2] * 4 + [5]) == ([], 0)


def test_b04_a_hit_is_the_longest_run_of_full_blocks_from_the_start():
    kv = manager(num_blocks=40)
    seq = start(kv, range(30))
    for length in range(1, 30):
        for shared in range(length + 1):
            tokens = [*range(shared), *range(100, 100 + length - shared)]
            full = shared // 4
            assert hit(kv, tokens) == (seq.block_table[:full], min(4 * full, length - 1))
    kv.block_pool.unpublish([kv.block_pool.blocks[seq.block_table[2]]])
    assert hit(kv, range(30)) == (seq.block_table[:2], 8)  # what lies behind a hole is of no use


def test_b05_a_fully_cached_prompt_still_computes_its_last_token():
    kv = manager()
    seq = start(kv, range(8))
    assert hit(kv, range(8)) == (seq.block_table, 7)
    again = start(kv, range(8))
    assert again.block_table == seq.block_table
    assert again.num_cached_tokens == 7
    assert hit(kv, range(4)) == (seq.block_table[:1], 3)


def test_b06_hits_leave_the_free_queue_and_are_shared():
    kv = manager(num_blocks=5)
    seq = start(kv, range(9))
    table = seq.block_table
    kv.free(seq)
    assert kv.block_pool.num_free == 4
    again = start(kv, range(9))
    assert again.block_table[:2] == table[:2]
    assert kv.block_pool.num_free == 1


def test_b07_freeing_is_in_reverse_order():
    kv = manager(num_blocks=5)
    seq = start(kv, range(16))
    table = seq.block_table
    kv.free(seq)
    assert seq.block_table == []
    assert [kv.block_pool.allocate(1)[0].block_id for _ in range(4)] == table[::-1]


def test_b10_an_allocation_that_cannot_be_met_changes_nothing_and_free_hits_count_against_supply():
    kv = manager(num_blocks=5)
    kv.free(start(kv, range(8)))  # two cached blocks among four free ones
    seq = sequence(range(20))  # five blocks: two hits, three new, but only two other blocks are free
    hits, _ = kv.get_computed_blocks(seq)
    assert len(hits) == 2
    queue = [block.block_id for block in kv.block_pool.free_queue]
    assert kv.shortage(seq, 20, hits) == 1
    assert kv.allocate_slots(seq, 20, hits) is None
    assert seq.block_table == []
    assert [block.block_id for block in kv.block_pool.free_queue] == queue
    assert [block.ref_count for block in hits] == [0, 0]
    assert kv.allocate_slots(seq, 16, hits) is not None  # four blocks fit exactly
    assert kv.block_pool.num_free == 0


def test_b10_hits_in_use_cost_nothing():
    kv = manager(num_blocks=5)
    first = start(kv, range(8))
    seq = sequence(range(16))
    hits, _ = kv.get_computed_blocks(seq)
    assert kv.allocate_slots(seq, 16, hits) == seq.block_table[2:]
    assert seq.block_table[:2] == first.block_table


def test_allocation_extends_a_table_and_knows_the_limit():
    kv = manager()
    seq = start(kv, range(4))
    assert kv.allocate_slots(seq, 4) == []
    assert kv.allocate_slots(seq, 9) == seq.block_table[1:]
    assert len(seq.block_table) == 3
    with pytest.raises(ValueError, match="max_model_len is 64"):
        kv.allocate_slots(seq, 65)


def test_b11_equal_content_computed_twice_keeps_two_blocks():
    kv = manager()
    first, second = sequence(range(8)), sequence(range(8))
    for seq in (first, second):  # neither is published when the other is admitted
        kv.allocate_slots(seq, 8)
    tables = [list(first.block_table), list(second.block_table)]
    for seq in (first, second):
        kv.publish(seq, np.arange(8, dtype=np.int32), 8)
    assert [first.block_table, second.block_table] == tables  # what is written in a table stays
    kv.block_pool.unpublish([kv.block_pool.blocks[i] for i in first.block_table])
    assert hit(kv, range(9)) == (second.block_table, 8)


def test_b16_caching_off_means_no_hashes_and_no_hits():
    kv = manager(caching=False)
    seq = start(kv, range(8))
    assert not kv.block_pool.cached
    assert all(block.digest is None for block in kv.block_pool.blocks)
    assert hit(kv, range(8)) == ([], 0)
    assert not kv.has_older_hit(list(range(8)))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits, seq.num_cached_tokens) == (0, 0, 0)


def test_b19_a_request_that_may_not_read_the_cache_still_fills_it():
    kv = manager()
    start(kv, range(8))
    scored = start(kv, range(12), read_cache=False)
    assert scored.num_cached_tokens == 0
    assert scored.num_published == 3
    assert kv.prefix_cache_queries == 8  # it asked nothing
    assert hit(kv, range(12))[1] == 11


def test_b20_hit_statistics_count_tokens():
    kv = manager()
    start(kv, range(10))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (10, 0)
    start(kv, range(11))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (21, 8)
    start(kv, range(8))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (29, 15)


def test_b21_an_older_hit_is_announced_but_not_given():
    kv = manager()
    seq = start(kv, range(8), cache_key=b"k")
    assert not kv.has_older_hit(list(range(8)), b"k")
    kv.block_pool.new_generation()
    assert kv.has_older_hit(list(range(4)), b"k")
    assert not kv.has_older_hit(list(range(3)), b"k")  # no full block
    assert not kv.has_older_hit(list(range(8)))
    assert not kv.has_older_hit([1, *range(7)], b"k")
    assert hit(kv, range(8), cache_key=b"k") == ([], 0)
    kv.block_pool.trust_older()
    assert not kv.has_older_hit(list(range(8)), b"k")
    assert hit(kv, range(8), cache_key=b"k") == (seq.block_table, 7)


def test_b14_a_preempted_sequence_publishes_anew_from_its_first_block():
    kv = manager(num_blocks=5)
    seq = start(kv, range(9))
    kv.free(seq)
    assert (seq.block_table, seq.num_published) == ([], 0)
    kv.block_pool.free(kv.block_pool.allocate(4))  # evicts everything
    hits, _ = kv.get_computed_blocks(seq)
    assert hits == []
    kv.allocate_slots(seq, 9, hits)
    kv.publish(seq, np.arange(9, dtype=np.int32), 9)
    assert hit(kv, range(9)) == (seq.block_table[:2], 8)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_any_power_of_two_block_size(block_size):
    kv = manager(block_size=block_size, num_blocks=1200, max_model_len=2000)
    tokens = list(range(2 * block_size + 1))
    seq = start(kv, tokens)
    assert len(seq.block_table) == 3
    full = len(tokens) // block_size
    assert hit(kv, tokens) == (seq.block_table[:full], min(full * block_size, len(tokens) - 1))
