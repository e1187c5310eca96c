"""Notices changed weights, so that keys and values computed with the old ones are never served.

Fused optimizers and writes through `.data` leave no trace in `_version`: only a checksum of all bytes is proof. The
counters and pointers are a shortcut to "surely changed".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_paged.guards.facts import tensors_inside
from hf_paged.guards.inner_tensors import watched
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models import ModelExecutor, find_executor
from hf_paged.models.eligibility import reason_under
from hf_paged.scheduler import BlockPool


class WeightsGuard:
    """Decides, each time an engine goes from idle to busy, whether what is cached still belongs to the weights.

    A checksum is enqueued every time, since what this call caches has to be comparable later. It is compared, which
    waits for it, only when a prompt would hit older blocks (`verify` at once) or when the first step's tokens are
    waited for anyway; until then older blocks are not hit. Ranks of a sharded model decide together: what changed on
    one has changed.

    Args:
        executor: of the model.
        on_change: called with `version` before it goes up.

    Attributes:
        version: goes up whenever the model is found to be another than before.
    """

    def __init__(self, executor: ModelExecutor, on_change: Callable[[int], None] = lambda version: None) -> None:
        self._executor = executor
        self._on_change = on_change
        self.version = 0
        self._signature: tuple | None = None
        self._checksum = ChecksumPlan()
        self._pending: torch.Tensor | None = None
        self._cached: int | None = None  # of the weights of `version`; None: not known yet

    def changed(self, *, full: bool) -> bool:
        """Are this rank's weights others than at `begin`? Without `full` only storage and versions are asked."""
        if self._signature != self._current_signature():
            return True
        if not full:
            return False
        baseline = self._cached if self._pending is None else int(self._pending)
        return int(self.fresh()) != baseline

    def begin(self, pool: BlockPool) -> None:
        """The engine was idle and becomes busy: distrust what is cached, and start the checksum."""
        tensors, buffers = _tensors_of(self._executor)
        signature = _signature(tensors)
        pool.new_generation()
        if self._executor.group.any(signature != self._signature):
            pool.drop_older()
            self._cached = None
            if self._signature is not None:
                self.found_change()
        self._signature = signature
        self._pending = self._checksum([*tensors, *buffers])

    @property
    def latest(self) -> torch.Tensor | None:
        """The checksum that `begin` started, [1] int64 on the weights' device; None after `verify`."""
        return self._pending

    def fresh(self) -> torch.Tensor:
        """A checksum of the weights as they are now, [1] int64, maybe still on its way."""
        tensors, buffers = _tensors_of(self._executor)
        return self._checksum([*tensors, *buffers])

    def announce(self, pool: BlockPool | None, *, is_busy: bool) -> None:
        """The weights were written, and whoever did so says it: nothing has to be compared to know.

        Args:
            pool: None: there is none yet.
            is_busy: requests go on, so that blocks are cached before the next `begin`: the checksum that these will be
                compared by is started.
        """
        self.found_change()
        self._signature, self._cached, self._pending = self._current_signature(), None, None
        if pool is not None:
            pool.new_generation()
            pool.drop_older()
        if is_busy:
            self._pending = self.fresh()

    def found_change(self) -> None:
        """The model is another."""
        self._on_change(self.version)
        self.version += 1

    @property
    def pending(self) -> bool:
        """True between `begin` and `verify`."""
        return self._pending is not None

    def verify(self, pool: BlockPool) -> None:
        """Wait for the checksum; trust the older blocks if the weights are theirs, else forget them."""
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
        """The cache is gone."""
        self._pending = None

    def release(self) -> None:
        """Give up the table of addresses that the checksum keeps on the device."""
        self._checksum = ChecksumPlan()

    def checksum(self) -> int | torch.Tensor:
        """Of the weights at `begin`, or as they are now where none was taken; a tensor may still be on its way."""
        taken = self._cached if self._pending is None else self._pending
        return self.fresh() if taken is None else taken

    def _current_signature(self) -> tuple:
        # Buffers are left to the checksum: some RoPE modules write theirs in every forward.
        return _signature(_tensors_of(self._executor)[0])


class ModelMark(NamedTuple):
    """What a model computed at some time, to be told from what it computes later. Keeps no memory of it."""

    options: dict[str, Any]
    autocast: torch.dtype | None
    state_key: bytes
    checksum: int | torch.Tensor

    def difference(self, model: Any) -> str | None:
        """Why a forward of `model` may compute something else now, or None."""
        executor_class = find_executor(model)
        if executor_class is None:
            return f"it is a {type(model).__name__}"
        executor = executor_class(model, **self.options)
        executor.autocast = self.autocast
        if (reason := reason_under(executor, self.autocast)) is not None:
            return reason
        if executor.state_key() != self.state_key:
            return "its adapters or constants are others"
        tensors, buffers = _tensors_of(executor)
        if int(ChecksumPlan()([*tensors, *buffers])) != int(self.checksum):
            return "its weights changed"
        return None


def _tensors_of(executor: ModelExecutor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and tensors that are plain attributes; buffers."""
    # Duplicates of buffers stay in: RoPE modules may make one an alias of another without changing what they compute.
    parameters, buffers = tensors_inside(executor.model)
    return watched([*parameters, *executor.plain_tensors()]), watched(buffers)


def _signature(tensors: list[torch.Tensor]) -> tuple:
    # Column by column: rows of a few hundred tensors take longer to make. Inference tensors have no version.
    without = list(map(torch.Tensor.is_inference, tensors))
    versions = [0 if none else t._version for t, none in zip(tensors, without, strict=True)]
    return list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.stride, tensors)), versions
