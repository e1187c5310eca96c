"""The model that an engine's steps run: detection of changes, and their effect on requests and cached blocks."""

from __future__ import annotations

import torch

from hf_paged.config import executor_options
from hf_paged.engine.engine_state import EngineState
from hf_paged.engine.session import Request
from hf_paged.runner.weights import ModelMark
from hf_paged.scheduler import Scheduler, Sequence


class PreparedModel(EngineState):
    """The part of the loop that compares the model with its last prepared state, and prepares the runner again."""

    def compute_under(self, autocast: torch.dtype | None) -> bool:
        """Compute later requests under this autocast; returns False if running requests need another one.

        A pool of another dtype is dropped.
        """
        if autocast == self._executor.autocast:
            return True
        self.recover_if_dirty()
        self.joining.end_orphans()
        if self.requests or self.batches:
            return False
        self._executor.autocast = autocast
        if self.pool.moved():
            self.drop_pool()
        return True

    def model_changed(self) -> bool:
        """Prepare the runner again if the model changed since it was last prepared; returns whether it changed."""
        if self._executor.state_key(compares_tensors=False) == self._state_key:
            if not self._executor.copies_are_stale():
                return False
            self._refresh_copies()
            return True
        self._leave_old_model(self.scheduler_or_build())
        self._prepare()
        return True

    def weights_written(self) -> None:
        """Treat the weights as changed since the last `drain`, even if storages and version counters are the same."""
        if not self._executor.group.is_parallel:
            self.recover_if_dirty()  # an interrupt inside the update may have left a change half done
        self._state_key = b""  # whatever else changed in this update belongs to the same weights version
        if self.scheduler is None:
            self._guard.announce(None, is_busy=False)
        elif self.pool.moved():
            self._guard.announce(None, is_busy=False)
            self.restart_over_a_new_pool()
        else:
            with self.changing(), self._executor.watch.compared_once():
                self._leave_old_model(self.scheduler)
                is_busy = bool(self.requests or self.batches)
                pool = self.scheduler.kv_cache_manager.block_pool
                self._guard.announce(pool, is_busy=is_busy and self._config.enable_prefix_caching)
                if is_busy:
                    self._prepare()
                    self._executor.refresh(None)
        self.weights_in_doubt = False

    def settle(self) -> None:
        """Recover from an interrupt before a step, also from an interrupt at the end of a weight update."""
        self.recover_if_dirty()
        if self.weights_in_doubt:
            self.weights_written()

    def trust_cache(self) -> None:
        """Wait for the checksum of the weights that `receive` started."""
        if self._guard.pending:
            assert self.scheduler is not None
            self._guard.verify(self.scheduler.kv_cache_manager.block_pool)

    def model_mark(self) -> ModelMark:
        """Return a fingerprint of what the model computed when prompts were last received."""
        options = executor_options(self._config)
        with self._at_work():
            return ModelMark(options, self._executor.autocast, self._state_key, self._guard.checksum())

    def weights_moved(self) -> bool:
        """Return whether storages or version counters of weights changed since prompts were last received."""
        return self._guard.changed(full=False)

    def _receive_requests(self) -> None:
        if self._arrivals:
            arrivals, self._arrivals = list(self._arrivals.values()), {}
            self._end_unfit(arrivals)
            self.receive([request.sequence for request in arrivals if self.has(request)])

    def receive(self, arrivals: list[Sequence]) -> None:
        """Receive prompts: prepare the runner for the model as it is now, and check older cached blocks."""
        scheduler = self.scheduler_or_build()
        manager, caching = scheduler.kv_cache_manager, self._config.enable_prefix_caching
        key = self._executor.state_key()
        self._use_keys(arrivals, key)
        if scheduler.num_running or self._in_flight is not None:
            would_hit = any(map(scheduler.would_hit, arrivals))
            assert self.pool.runner is not None
            changed = key != self._state_key or not self.pool.runner.is_current()
            changed = changed or (caching and self._guard.changed(full=would_hit))
            if not self._executor.group.any(changed):  # if one rank computes again, all ranks have to
                if self._executor.has_copies:  # what arrived must not be computed with stale copies
                    self._refresh_copies()
                return
            self._leave_old_model(scheduler)
        self._prepare()
        if caching:
            self._guard.begin(manager.block_pool)
        if self._executor.has_copies:
            self.runner.follow_stream()
            self._executor.refresh(self._guard.latest)
        if caching:
            sequences = [*(request.sequence for request in self.requests.values()), *arrivals]
            size = manager.block_size
            if any(manager.has_older_hit(s.ids_between(0, size), s.block_key(0, size)) for s in sequences):
                self._guard.verify(manager.block_pool)

    def _refresh_copies(self) -> None:
        """Renew copies of weights while requests run, which continue with the new values, as without copies."""
        if self._executor.copies_are_stale():
            self.commit_in_flight()  # before `_prepare`, which may drop copies that the step in flight reads
            self._prepare()
        self.runner.follow_stream()
        self._executor.refresh(self._guard.fresh())

    def _leave_old_model(self, scheduler: Scheduler) -> None:
        """Preempt running requests after a change of the model: their keys and values are computed again, or kept.

        All later steps compute with the changed model.
        """
        self.commit_in_flight()
        self._executor.watch.compare_again()  # the commit may have run code of the user (a tokenizer, a stop rule)
        scheduler.preempt_all(but_keepers=True)
        for batch in self.batches:
            batch.invalidate_prefix()

    def _prepare(self) -> None:
        assert self.pool.runner is not None
        self.pool.runner.prepare()
        before, self._state_key = self._state_key, self._executor.state_key()
        if self._state_key != before:
            self.runner.look_at_windows()
        if before and self._state_key != before:
            self._guard.found_change()
        for batch in self.batches if self._state_key != before else ():
            batch.invalidate_prefix()
        self._end_unfit(list(self.requests.values()))
        self.features.call("prepared")
        self._use_keys([request.sequence for request in self.requests.values()], self._state_key)

    def _end_unfit(self, requests: list[Request]) -> None:
        """End the requests that cannot run on the model as it is now; none of their tokens may be in flight."""
        for feature in self.features.having["unfit"]:
            for request, error in feature.unfit(requests):
                self.end(request, "error", error)

    def _use_keys(self, sequences: list[Sequence], state_key: bytes) -> None:
        """Set the key under which the prefix cache keeps each sequence's blocks: of the model, or of its adapter."""
        keys: dict[str | None, bytes] = {None: state_key}
        for sequence in sequences:
            if (name := sequence.adapter) not in keys:
                keys[name] = self._executor.state_key(name)
            sequence.use_model_key(keys[name])
