"""Random histories: whatever happens in whatever order, the books agree and the tokens are right."""

import itertools
from collections import Counter

import invariants
import pytest
from fake_model import Driver, abort, alone, config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_pool

from hf_paged.scheduler import BlockPool, Status, block_pool
from hf_paged.scheduler.block_pool import ROOT_DIGEST, ROOT_PREFIX_ID

COMMON = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and free blocks; a model of every block's history says what may be found."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.holders = []  # [blocks, chain of contents published so far]
        self.chain_of = {}  # block id -> (chain of contents, generation), while published

    def uses(self):
        return Counter(block.block_id for blocks, _ in self.holders for block in blocks)

    def find(self, chain):
        digest, parent, found = ROOT_DIGEST, ROOT_PREFIX_ID, []
        for content in chain:
            digest = block_pool.hash_block(digest, content)
            block = self.pool.lookup(digest, content, parent)
            if block is None:
                break
            parent = block.prefix_id
            found.append(block)
        return found

    @rule(n=st.integers(0, 6))
    def allocate(self, n):
        queue = [block.block_id for block in self.pool.free_queue]
        if n > self.pool.num_free:
            try:
                self.pool.allocate(n)
            except ValueError:
                assert [block.block_id for block in self.pool.free_queue] == queue
                return
            raise AssertionError("more blocks than there are")
        blocks = self.pool.allocate(n)
        assert [block.block_id for block in blocks] == queue[:n]
        for block in blocks:
            self.chain_of.pop(block.block_id, None)
        if n:
            self.holders.append([blocks, ()])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b"]))
    def publish(self, data, content):
        holder = data.draw(st.sampled_from(self.holders))
        blocks, chain = holder
        if len(chain) == len(blocks):
            return
        digest, parent = ROOT_DIGEST, ROOT_PREFIX_ID
        for block in blocks[: len(chain)]:
            if block.digest is None:
                return
            digest, parent = block.digest, block.prefix_id
        block = blocks[len(chain)]
        if block.digest is not None:
            return
        self.pool.publish(block, block_pool.hash_block(digest, content), content, parent)
        holder[1] = (*chain, content)
        self.chain_of[block.block_id] = (holder[1], self.pool.generation)

    @rule(chain=st.lists(st.sampled_from([b"a", b"b"]), max_size=4))
    def hit(self, chain):
        found = self.find(chain)
        for i, block in enumerate(found):
            published, generation = self.chain_of[block.block_id]
            assert published == tuple(chain[: i + 1])
            assert generation >= self.pool.trusted_from
        if found:
            self.pool.touch(found)
            self.holders.append([found, tuple(chain[: len(found)])])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks, _ = self.holders.pop(index)
        before = self.pool.num_free
        self.pool.free(list(reversed(blocks)))
        assert self.pool.num_free == before + sum(not self.uses()[block.block_id] for block in blocks)

    @precondition(lambda self: self.chain_of)
    @rule(data=st.data())
    def unpublish(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.chain_of)))
        self.pool.unpublish([self.pool.blocks[block_id]])
        del self.chain_of[block_id]

    @rule()
    def new_generation(self):
        self.pool.new_generation()

    @rule()
    def trust(self):
        self.pool.trust_older()

    @rule()
    def drop(self):
        self.pool.drop_older()
        self.chain_of = {k: v for k, v in self.chain_of.items() if v[1] == self.pool.generation}

    @rule()
    def reset(self):
        assert self.pool.reset() == (not self.holders)
        if not self.holders:
            self.chain_of.clear()

    @rule(extra=st.integers(0, 2))
    def grow(self, extra):
        if self.pool.num_blocks < 16:
            self.pool.grow(self.pool.num_blocks + extra)

    @invariant()
    def books_agree(self):
        if hasattr(self, "pool"):
            check_pool(self.pool, self.uses())
            assert {b.block_id for same in self.pool.cached.values() for b in same.values()} == set(self.chain_of)


class CollidingPoolMachine(PoolMachine):
    """The same when every hash is equal."""

    @initialize()
    def collide(self):
        self.real = block_pool.hash_block
        block_pool.hash_block = lambda parent_digest, content: b"same"

    def teardown(self):
        block_pool.hash_block = getattr(self, "real", block_pool.hash_block)


BASES = [[(7 * i + 3 * j * j) % 97 for i in range(40)] for j in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    """A whole engine's life on a fake model that reads its own paged memory."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        room=st.sampled_from([12, 20, 60]),
        growth=st.sampled_from([0, 0, 10]),
        max_num_seqs=st.sampled_from([1, 2, 3, 5]),
        budget=st.sampled_from([5, 8, 30]),
        max_model_len=st.sampled_from([16, 40]),
        caching=st.sampled_from([True, True, False]),
        overlap=st.booleans(),
        vocab=st.sampled_from([7, 97]),
    )
    def start(self, block_size, room, growth, max_num_seqs, budget, max_model_len, caching, overlap, vocab):
        sizes = config(
            block_size=block_size,
            num_blocks=1 + room // block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
        )
        max_blocks = sizes.num_blocks + growth if growth else 0
        self.driver = Driver(sizes, overlap=overlap, max_blocks=max_blocks, vocab=vocab)
        self.seqs = []
        self.num_added = 0
        self.has_stale = False

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 96), max_size=3),
        max_new_tokens=st.integers(1, 20),
        eos=st.sampled_from([(), (1,), (2, 3, 4)]),
        priority=st.integers(0, 2),
        read_cache=st.sampled_from([True, True, True, False]),
        cache_key=st.sampled_from([b"", b"", b"k"]),
        keeps=st.booleans(),
    )
    def add(self, base, shared, own, max_new_tokens, eos, priority, read_cache, cache_key, keeps):
        tokens = (base[:shared] + own)[: self.driver.config.max_model_len - 1] or [5]
        seq = self.driver.add(
            str(self.num_added), tokens, max_new_tokens, eos_token_ids=eos, priority=priority, read_cache=read_cache,
            cache_key=cache_key, keeps_computed=keeps,
        )
        self.num_added += 1
        self.seqs.append(seq)

    @rule(
        lengths=st.lists(st.tuples(st.sampled_from(BASES), st.integers(1, 24), st.integers(1, 20)), max_size=4),
        n=st.integers(1, 8),
    )
    def traffic(self, lengths, n):
        for base, length, max_new_tokens in lengths:
            self.add(base, length, [], max_new_tokens, (1,), 0, True, b"", False)
        self.steps(n)

    @rule(n=st.integers(1, 6))
    def steps(self, n):
        for _ in range(n):
            self.driver.step()

    @rule()
    def failing_launch(self):
        self.driver.model.fail_next = True
        self.driver.step()
        self.driver.model.fail_next = False

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), how=st.sampled_from(["abort", "stop", "nan"]))
    def end_one(self, data, how):
        seq = data.draw(st.sampled_from(self.seqs))
        if how == "nan":
            self.driver.model.bad_requests.add(seq.request_id)
        elif how == "stop":
            self.driver.scheduler.finish(seq, "stop")
        else:
            abort(self.driver.scheduler, seq.request_id)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), n=st.integers(0, 4))
    def hold_one(self, data, n):
        """A held sequence gets no slot, and others go on; releasing it is safe whatever became of it."""
        seq, scheduler = data.draw(st.sampled_from(self.seqs)), self.driver.scheduler
        scheduler.hold(seq)
        held = seq.request_id in scheduler._waiting.held
        assert held == (seq.status is Status.WAITING)
        self.steps(n)
        assert not held or (seq.status is Status.WAITING and seq.slot < 0)
        if data.draw(st.booleans()):
            scheduler.release(seq)
            scheduler.release(seq)

    @rule()
    def start_over(self):
        self.driver.drain()
        self.driver.scheduler.preempt_all()

    @rule(n=st.integers(1, 6), right=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def drafted_steps(self, n, right):
        """Steps with drafts, of which some numbers are right, and one behind them is wrong."""
        counts = itertools.cycle(right)

        def draft(seq):
            truth = alone(seq, self.driver.config.max_model_len, self.driver.model.vocab, self.driver.model.weights)[0]
            count = next(counts)
            return [*truth[seq.num_output_tokens :][:count], self.driver.model.vocab + 1, 0]

        self.driver.draft = draft
        self.steps(n)
        self.driver.draft = None

    @rule(announced=st.booleans())
    def change_weights(self, announced):
        """Sequences that keep what they have go on over it; whatever can be found is of the new weights alone."""
        self.driver.drain()
        self.check_finished()
        scheduler = self.driver.scheduler
        running = [seq for seq in self.seqs if seq.status is Status.RUNNING]
        computed = {id(seq): seq.num_computed_tokens for seq in running}
        scheduler.preempt_all(but_keepers=True)
        pool = scheduler.kv_cache_manager.block_pool
        pool.new_generation()
        self.has_stale |= not announced  # a checksum is compared later: till then what is older is not trusted
        if announced:
            pool.drop_older()
        self.driver.model.weights += 1
        self.driver.spans_change |= {seq.request_id for seq in self.seqs}
        for seq in running:
            assert (seq.status is Status.RUNNING) == seq.keeps_computed
            assert seq.num_computed_tokens == (computed[id(seq)] if seq.keeps_computed else 0)

    @rule(base=st.sampled_from(BASES), length=st.integers(1, 3), before=st.integers(1, 3), after=st.integers(1, 6),
          announced=st.booleans())
    def change_weights_in_a_first_block(self, base, length, before, after, announced):
        self.add(base, length, [], 12, (), 0, True, b"", True)
        self.steps(before)
        self.change_weights(announced)
        self.steps(after)

    @rule()
    def grow(self):
        if self.driver.scheduler.num_blocks < self.driver.max_blocks:
            total = self.driver.scheduler.num_blocks + 1
            self.driver.model.grow(total)
            self.driver.scheduler.grow(total)

    @rule()
    def reset_cache(self):
        scheduler = self.driver.scheduler
        nothing_used = scheduler.num_free_blocks == scheduler.num_blocks - 1
        assert scheduler.reset_prefix_cache() == nothing_used

    @rule(changed=st.booleans(), verified=st.booleans())
    def new_call(self, changed, verified):
        """All requests end; the next call may come with other weights."""
        self.finish_all()
        pool = self.driver.scheduler.kv_cache_manager.block_pool
        pool.new_generation()
        if changed:
            self.driver.model.weights += 1
        if changed or self.has_stale:
            pool.drop_older()
        elif verified:
            pool.trust_older()
        self.has_stale = False

    @invariant()
    def books_agree(self):
        if hasattr(self, "driver"):
            invariants.check(self.driver.scheduler)
            self.driver.check_findable()

    def finish_all(self):
        for seq in self.seqs:
            self.driver.scheduler.release(seq)
        self.driver.run()
        self.check_finished()
        assert not self.seqs

    def check_finished(self):
        for seq in [seq for seq in self.seqs if seq.status is Status.FINISHED]:
            self.seqs.remove(seq)
            self.driver.check_output(seq)
            if seq.finish_reason == "error" and seq.request_id not in self.driver.model.bad_requests:
                assert seq in self.driver.finished

    def teardown(self):
        if hasattr(self, "driver"):
            self.finish_all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, **COMMON)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(max_examples=100, stateful_step_count=40, **COMMON)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=30, **COMMON)


@pytest.mark.slow
class TestPoolAtLength(PoolMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=40, **COMMON)


@pytest.mark.slow
class TestCollidingPoolAtLength(CollidingPoolMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40, **COMMON)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=1600, stateful_step_count=30, **COMMON)
