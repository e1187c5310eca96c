"""Whether 4-bit layers run by copies of their weights, by kernels that read their bytes, or as they stand."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hf_paged.device.cuda import free_memory
from hf_paged.kernels._triton import why_not_on
from hf_paged.kernels.layer.linear_4bit import Packed4BitGroup, fit, scratch_size
from hf_paged.models.copied_weights import Groups, copied_bytes, has_4bit, packed_weight

logger = logging.getLogger(__name__)

_COPIED_SHARE = 0.5  # of free memory that copies of 4-bit weights may take with dequantize="auto"


class WeightsPlan(NamedTuple):
    """What steps multiply with in place of some layers.

    Attributes:
        dtype: dtype in which they compute.
        copied: groups of layers of which there are to be copies.
        packed: groups of 4-bit layers whose bytes kernels read.
        scratch: elements of the scratch of these kernels.
    """

    dtype: torch.dtype
    copied: Groups = MappingProxyType({})
    packed: Groups = MappingProxyType({})
    scratch: int = 0

    @property
    def device(self) -> torch.device | None:
        """Where the layers are; None: there are none."""
        device: torch.device | None = next((of[0].weight.device for of in (self.packed or self.copied).values()), None)
        return device

    @property
    def nbytes(self) -> int:
        """Bytes of the copies and the scratch."""
        return copied_bytes(self.copied, self.dtype) + self.scratch * self.dtype.itemsize


class Dequantizing:
    """The choice of `PagedConfig.dequantize` for one model: `wants`. What is decided once stays so."""

    def __init__(self, wants: bool | str) -> None:
        self.wants = wants
        self._fitting: dict[int, bool] = {}  # by bytes of copies, whether they may be made

    def plan(self, groups: Groups, dtype: torch.dtype, device: torch.device, *, by_kernels: bool,
             head: str, whole: bool) -> WeightsPlan:
        """Return what is made of groups of layers that can be copied.

        Args:
            by_kernels: whether kernels may read 4-bit weights.
            head: the group that is not read by kernels.
            whole: whether all layers of the groups have to run so, or none.
        """
        if not has_4bit(groups) or self._may_copy(groups, dtype, device):
            return WeightsPlan(dtype, groups)
        packed = packable(groups, dtype, device, head) if by_kernels else {}
        rest = {key: linears for key, linears in groups.items() if key not in packed}
        if whole and has_4bit(rest):
            return WeightsPlan(dtype)
        weights = [[(linear.out_features, linear.in_features) for linear in linears] for linears in packed.values()]
        return WeightsPlan(dtype, rest if whole else {}, packed, scratch_size(weights, dtype))

    def _may_copy(self, groups: Groups, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether copies of these groups may be made; decided once, since copies change what is free."""
        if self.wants != "auto":
            return bool(self.wants)
        size = copied_bytes(groups, dtype)
        if size not in self._fitting:
            self._fitting[size] = size <= _COPIED_SHARE * free_memory(device)
            logger.info("hf_paged: copies of 4-bit weights take %.2f GiB and are %s", size / 2**30,
                        "made" if self._fitting[size] else "not made: memory is short")
        return self._fitting[size]

    def without_copies(self, size: int) -> None:
        """Make no copies of so many bytes, for which memory was too short.

        Raises:
            torch.OutOfMemoryError: copies are to be made in any case.
        """
        if self.wants is True:
            raise torch.OutOfMemoryError(
                f"dequantize=True: {size / 2**30:.2f} GiB for copies of the 4-bit weights are not free. Free memory, "
                "or set dequantize=\"auto\" or False, with which the layers run without copies")
        self._fitting[size] = False

    def describe(self, groups: Groups, dtype: torch.dtype, device: torch.device, *, by_kernels: bool, head: str) -> str:
        """Return how 4-bit layers of groups that can be copied would run without autocast, and why."""
        if not groups:
            return f"as they stand: they do not compute in {dtype}, or have hooks or patched code"
        size, free = copied_bytes(groups, dtype), free_memory(device)
        if self.wants is True or (self.wants == "auto" and size <= _COPIED_SHARE * free):
            return f"by copies of {size / 2**30:.2f} GiB in {dtype}"
        packed = by_kernels and packable(groups, dtype, device, head)
        how = "by kernels that read their bytes" if packed else "as they stand"
        return f"{how}: " + ("dequantize=False" if self.wants is False else
                             f"copies of {size / 2**30:.2f} GiB exceed half of the {free / 2**30:.2f} GiB free")


def reads_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels that read 4-bit weights run on a device, and compute in a dtype."""
    return why_not_on(device) is None and dtype in (torch.float16, torch.bfloat16)


def packable(groups: Groups, dtype: torch.dtype, device: torch.device, head: str) -> Groups:
    """Return the groups of 4-bit layers whose bytes kernels read."""
    if not reads_packed(device, dtype):
        return {}
    nowhere = torch.empty(0, dtype=dtype, device="cpu")
    return {key: linears for key, linears in groups.items()
            if key != head and packed_group(linears, dtype, nowhere) is not None}


def packed_group(linears: tuple[Any, ...], dtype: torch.dtype, scratch: torch.Tensor) -> Packed4BitGroup | None:
    """Return 4-bit layers of one input as kernels multiply with them, or None if one is no layer that they take."""
    weights = [packed for linear in linears if (packed := packed_weight(linear, dtype)) is not None]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    whole = len(weights) == len(linears) and len(biases) in (0, len(linears))
    if not whole or any(bias.dtype != dtype or not bias.is_contiguous() for bias in biases):
        return None
    return Packed4BitGroup(tuple(weights), tuple(biases), scratch) if fit(weights) else None
