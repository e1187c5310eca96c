"""Detection of changed weights, so that keys and values computed with old weights are never used.

Fused optimizers and writes through `.data` do not raise `_version`: only a checksum of all bytes is proof. Version
counters and pointers (`ModelWatch.contents`) only detect certain changes sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models import ModelExecutor, find_executor
from hf_paged.models.eligibility import why_not_under
from hf_paged.scheduler import BlockPool


class WeightsGuard:
    """Decides, whenever an idle engine gets requests, whether cached blocks still belong to the weights.

    A checksum is enqueued every time, since the blocks of this run have to be comparable later. The comparison waits
    for it, and happens only if a prompt would hit older blocks (`verify` at once) or together with the wait for the
    first step's tokens; until then older blocks are not hit. Ranks of a sharded model decide together: a change on one
    rank is a change.

    Args:
        executor: Executor of the model.
        on_change: Called with `version` before it is raised.

    Attributes:
        version: Raised whenever a change of the model is found.
    """

    def __init__(self, executor: ModelExecutor, on_change: Callable[[int], None] = lambda version: None) -> None:
        self._executor = executor
        self._on_change = on_change
        self.version = 0
        self._contents: int | None = None  # the number at `begin`
        self._checksum = ChecksumPlan()
        self._pending: torch.Tensor | None = None
        self._cached: int | None = None  # checksum of the weights of `version`; None if unknown

    def changed(self, *, full: bool) -> bool:
        """Return whether this rank's weights differ from `begin`; without `full` compares only storage and versions."""
        if self._contents != self._executor.contents():
            return True
        if not full:
            return False
        baseline = self._cached if self._pending is None else int(self._pending)
        return int(self.fresh()) != baseline

    def begin(self, pool: BlockPool) -> None:
        """Exclude cached blocks from hits and start the checksum, when an idle engine gets requests."""
        contents = self._executor.contents()
        pool.new_generation()
        if self._executor.group.any(contents != self._contents):
            pool.drop_older()
            self._cached = None
            if self._contents is not None:
                self.found_change()
        self._contents = contents
        self._pending = self.fresh()

    @property
    def latest(self) -> torch.Tensor | None:
        """Return the checksum that `begin` started, [1] int64 on the weights' device; None after `verify`."""
        return self._pending

    def fresh(self) -> torch.Tensor:
        """Start a checksum of the current weights, [1] int64; the result may not be ready yet."""
        tensors = self._executor.tensors()
        return self._checksum([*tensors.weights, *tensors.buffers])

    def announce(self, pool: BlockPool | None, *, is_busy: bool) -> None:
        """Record a change of the weights that the caller reports, without comparing.

        Args:
            pool: None if there is no pool yet.
            is_busy: Requests continue and cache blocks before the next `begin`: start the checksum that those blocks
                will be compared by.
        """
        self.found_change()
        self._contents, self._cached, self._pending = self._executor.contents(), None, None
        if pool is not None:
            pool.new_generation()
            pool.drop_older()
        if is_busy:
            self._pending = self.fresh()

    def found_change(self) -> None:
        """Raise `version` after a change was found."""
        self._on_change(self.version)
        self.version += 1

    @property
    def pending(self) -> bool:
        """Return whether `begin` started a checksum that `verify` has not compared yet."""
        return self._pending is not None

    def verify(self, pool: BlockPool) -> None:
        """Wait for the checksum; trust older blocks if it equals theirs, else drop them."""
        assert self._pending is not None
        checksum, self._pending = int(self._pending), None
        if self._executor.group.any(checksum != self._cached):
            pool.drop_older()
            if self._cached is not None:
                self.found_change()
        else:
            pool.trust_older()
        self._cached = checksum

    def forget(self) -> None:
        """Discard the pending checksum after the cache was dropped."""
        self._pending = None

    def release(self) -> None:
        """Release the table of addresses that the checksum keeps on the device."""
        self._checksum = ChecksumPlan()

    def checksum(self) -> int | torch.Tensor:
        """Return the checksum of the weights at `begin`, or of the current ones if none; a tensor may not be ready
        yet."""
        taken = self._cached if self._pending is None else self._pending
        return self.fresh() if taken is None else taken


class ModelMark(NamedTuple):
    """Fingerprint of what a model computes, for a later comparison; keeps no reference to the model."""

    options: dict[str, Any]
    autocast: torch.dtype | None
    state_key: bytes
    checksum: int | torch.Tensor

    def difference(self, model: Any) -> str | None:
        """Return why a forward of `model` may compute something else now, or None."""
        executor_class = find_executor(model)
        if executor_class is None:
            return f"it is a {type(model).__name__}"
        executor = executor_class(model, **self.options)
        executor.autocast = self.autocast
        if (reason := why_not_under(executor, self.autocast)) is not None:
            return reason
        if executor.state_key() != self.state_key:
            return "its adapters or constants are others"
        tensors = executor.tensors()
        if int(ChecksumPlan()([*tensors.weights, *tensors.buffers])) != int(self.checksum):
            return "its weights changed"
        return None
