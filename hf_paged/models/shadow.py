"""Shadow: copies of weights in the dtype that a call computes in, while the weights keep the trainer's dtype.

The copies are renewed together when the weights changed. On a GPU the device itself compares the checksum of the
weights with that of the last renewal, so that the host need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_paged.kernels.cast_copies import CopyPlan


class Shadow:
    """Copies in target tensors that are renewed from sources: any views, which need not be of one dtype.

    Args:
        targets: tensors for the copies, whose addresses stay.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self.targets = list(targets)
        self._plan = CopyPlan(targets)
        self._checksum: torch.Tensor | None = None  # [1] int64, of the weights that were copied
        self._marks: tuple[list[int], list[int]] = [], []

    def refresh(self, sources: Sequence[torch.Tensor], checksum: torch.Tensor | None = None) -> None:
        """Enqueue renewing the copies, if the sources changed, on the current stream; does not wait.

        Args:
            sources: present source of each target, of the target's shape.
            checksum: ``[1]`` int64 on their device over all that the sources can hold, comparable with checksums of
                other calls. None: the copies are made in any case.
        """
        self._marks = _marks(sources)
        known = self._checksum if checksum is not None else None
        self._plan(sources, None if known is None else checksum, known)
        if checksum is None:
            self._checksum = None
        elif self._checksum is None:
            self._checksum = checksum.clone()
        else:
            self._checksum.copy_(checksum)

    def is_stale(self, sources: Sequence[torch.Tensor]) -> bool:
        """Return whether addresses or version counters of the sources changed; fused optimizers change neither."""
        return self._marks != _marks(sources)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies' storages, each counted once."""
        storages = {s.data_ptr(): s.nbytes() for s in (target.untyped_storage() for target in self.targets)}
        return sum(storages.values())


def _marks(sources: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    try:
        versions = [s._version for s in sources]
    except RuntimeError:  # tensors made under inference mode have no version
        versions = [0 if s.is_inference() else s._version for s in sources]
    return [s.data_ptr() for s in sources], versions
