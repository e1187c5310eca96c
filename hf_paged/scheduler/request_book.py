"""Who is here and in which state: every way into and out of waiting, running and finished."""

from __future__ import annotations

from collections import deque

from hf_paged.scheduler.kv_cache_manager import KVCacheManager
from hf_paged.scheduler.plan import SchedulerConfig, StepPlan
from hf_paged.scheduler.running_table import RunningTable
from hf_paged.scheduler.sequence import Sequence, Status
from hf_paged.scheduler.waiting_queue import WaitingQueue


class RequestBook:
    """The state of a `Scheduler` and its transitions; what a step consists of is decided there.

    A call that an exception from outside (Ctrl-C) cuts short leaves the books in doubt: make a new scheduler then.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv_cache_manager = KVCacheManager(
            config.block_size, config.num_blocks, config.enable_prefix_caching, config.max_model_len
        )
        self.num_preemptions = 0  # for want of blocks
        self._table = RunningTable(config.max_num_seqs)
        self._waiting = WaitingQueue()
        self._requests: dict[str, Sequence] = {}  # unfinished ones
        self._partial: Sequence | None = None  # prefill under way; two at once can't be, the first takes the budget
        self._in_flight: deque[StepPlan] = deque()
        self._failed: list[Sequence] = []
        self._num_arrived = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises ValueError if its id is taken or its prompt leaves no room for a token."""
        if seq.request_id in self._requests:
            raise ValueError(f"request_id {seq.request_id!r} belongs to an unfinished request")
        if seq.num_prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"request {seq.request_id!r}: the prompt has {seq.num_prompt_tokens} tokens; max_model_len "
                f"({self.config.max_model_len}) must leave room for at least one more"
            )
        seq.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[seq.request_id] = seq
        self._waiting.push(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """Finish a request with ``"abort"``; None if no unfinished request has this id."""
        seq = self._requests.get(request_id)
        if seq is not None:
            self.finish(seq, "abort")
        return seq

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now. Tokens in flight are dropped; blocks go back once the plans naming it are committed."""
        if seq.status is not Status.FINISHED:
            self._finish(seq, reason)

    def take_failed(self) -> list[Sequence]:
        """Sequences that `schedule` finished with ``"error"`` since the last call: the pool is too small for them."""
        failed, self._failed = self._failed, []
        return failed

    def preempt_all(self) -> None:
        """Send every running sequence back to waiting and drop the plans in flight (their blocks are not hit)."""
        pool, table = self.kv_cache_manager.block_pool, self._table
        for plan in self._in_flight:
            pool.unpublish(plan.published)
            for seq in plan.sequences:
                seq.num_in_flight = 0
        self._in_flight.clear()
        table.in_flight[:] = 0
        # Newest first: the oldest keep their cached blocks longest.
        for seq in sorted(table.tenants(), key=lambda seq: seq.rank, reverse=True):
            if seq.status is Status.FINISHED:
                self._release(seq.slot)
            else:
                self._send_back(seq)

    def rollback(self, plan: StepPlan) -> None:
        """The launch of this plan raised: nothing it promised to compute may be hit, and all start over.

        An older plan that is not committed is dropped with it. Raises ValueError if this plan is not in flight.
        """
        if not any(plan is other for other in self._in_flight):
            raise ValueError("the plan is not in flight")
        self.preempt_all()

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return self._table.num_free_slots

    def take_slots(self, count: int) -> list[int]:
        """Lend slots to rows that are none of the scheduler's; nothing may be scheduled until `give_slots`."""
        return self._table.take(count)

    def give_slots(self, slots: list[int]) -> None:
        """Take them back."""
        self._table.give(slots)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.kv_cache_manager.block_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_free

    def grow(self, num_blocks: int) -> None:
        """Raise the number of blocks to this total; never lowers it."""
        self.kv_cache_manager.block_pool.grow(num_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while a block is in use."""
        return self.kv_cache_manager.block_pool.reset()

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.status is Status.WAITING:
            self._waiting.count_out()
        seq.finish_reason = reason
        seq.status = Status.FINISHED
        del self._requests[seq.request_id]
        if seq is self._partial:
            self._partial = None
        slot = seq.slot
        if slot >= 0:
            seq.detach(seq.num_computed_tokens)
            self._table.decoding[slot] = False
            self._table.draining[slot] = True
            if not self._table.in_flight[slot]:
                self._release(slot)

    def _fail(self, seq: Sequence) -> None:
        self._finish(seq, "error")
        self._failed.append(seq)

    def _release(self, slot: int) -> None:
        """Blocks and slot of a finished sequence go back."""
        seq = self._table.sequences[slot]
        assert seq is not None
        self.kv_cache_manager.free(seq)
        self._table.vacate(slot)

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._send_back(seq)

    def _send_back(self, seq: Sequence) -> None:
        """From running to waiting: output kept, everything computed given up."""
        if seq is self._partial:
            self._partial = None
        slot = seq.slot
        seq.num_in_flight = int(self._table.in_flight[slot])
        self.kv_cache_manager.free(seq)
        seq.detach(0)
        self._table.vacate(slot)
        seq.status = Status.WAITING
        self._waiting.push(seq)
