"""Copies of a dense decoder's linear layers in the dtype they compute in, layers with one input side by side.

They are cast from parameters, under autocast, or dequantised from the 4-bit weights of bitsandbytes' `Linear4bit`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.device.virtual_memory import DriverError, reserve
from hf_paged.guards.original_classes import patched_class
from hf_paged.kernels.cast_copies import CopyPlan
from hf_paged.kernels.dequantize_4bit import NestedScales, Packed4Bit
from hf_paged.models.layer_ops import is_plain_linear

logger = logging.getLogger(__name__)

_ALIGNMENT = 512  # bytes
_BITSANDBYTES, _LINEARS = "bitsandbytes.nn.modules", ("Linear4bit", "LinearNF4", "LinearFP4")

Groups = Mapping[str, tuple[Any, ...]]  # linear layers that read one input, by a name


class Copies(NamedTuple):
    """Merged copies that linear layers with one input multiply with: weight [sum n_i, k], bias [sum n_i] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class CopiedWeights:
    """Copies for the groups in which a parameter has another dtype; other groups use their own parameters.

    The copies' addresses do not change, since CUDA graphs read from them. Where the device can map memory, `unmap`
    releases it and `restore` allocates it at the same addresses.

    Args:
        groups: layers that `can_be_copied`, grouped by equal inputs.
        dtype: dtype of the copies.
        scratch: elements of a scratch beside them (`Packed4BitGroup.scratch`), on `device`; 0: none is needed.

    Attributes:
        by_name: the copies by group.
        scratch: ``[scratch]`` of `dtype`, or None.

    Raises:
        torch.OutOfMemoryError: too little memory is free.
    """

    def __init__(self, groups: Groups, dtype: torch.dtype, scratch: int = 0,
                 device: torch.device | None = None) -> None:
        self.by_name: dict[str, Copies] = {}
        self.scratch: torch.Tensor | None = None
        self._dtype = dtype
        self._layout, self._scratch_size = _layout(groups, dtype), scratch
        self._plan = CopyPlan([])
        self._checksum: torch.Tensor | None = None  # [1] int64, of the weights that were copied
        self._places: dict[str, tuple[list[int], list[tuple[int, ...]]]] = {}  # rows of each layer; shapes of `Copies`
        self._device = device or torch.device("cpu")
        for name, linears in _to_copy(groups, dtype):
            weights = [_weight(linear, dtype) for linear in linears]
            weight, sizes = weights[0], [weight.shape[0] for weight in weights]
            shape = sum(sizes), *weight.shape[1:]
            self._places[name] = sizes, [shape] if linears[0].bias is None else [shape, shape[:1]]
            self._device = weight.device
        self._shapes = [shape for _, shapes in self._places.values() for shape in shapes]
        self._shapes += [(scratch,)] if scratch else []
        self._num_bytes = sum(_whole(shape, dtype) for shape in self._shapes)
        self._memory = reserve(self, self._device, 1, self._num_bytes) if self._shapes else None
        self.restore()

    def restore(self) -> None:
        """Allocate the memory again after `unmap`; `refresh` has to fill it.

        Raises:
            torch.OutOfMemoryError: too little memory is free; nothing changed.
        """
        if self.is_here:
            return
        with torch.inference_mode(False), torch.no_grad():
            tensors = iter(self._allocated())
            targets: list[torch.Tensor] = []
            by_name: dict[str, Copies] = {}
            for name, (sizes, shapes) in self._places.items():
                made = [next(tensors) for _ in shapes]
                by_name[name] = Copies(*made)
                targets += [part for one in made for part in one.split(sizes)]
        self._plan, self._checksum, self.scratch = CopyPlan(targets), None, next(tensors, None)
        self.by_name = by_name  # last: `is_here` reads it

    def unmap(self) -> bool:
        """Release the memory and keep its addresses; returns False if only the end of this object can free it."""
        if self._memory is None:
            return False
        self.by_name, self._plan, self.scratch = {}, CopyPlan([]), None
        try:
            self._memory.release()
        except DriverError:
            return False
        return True

    @property
    def is_here(self) -> bool:
        """Whether there is memory for all copies, and the scratch."""
        return len(self.by_name) == len(self._places) and (self.scratch is None) == (not self._scratch_size)

    def _allocated(self) -> list[torch.Tensor]:
        """Allocate a tensor of every shape."""
        if self._memory is not None:
            try:
                self._memory.back(self._num_bytes)
            except DriverError as error:
                logger.warning("hf_paged: copies of weights lie in torch's memory: %s", error)
                self._memory.close()
                self._memory = None
        if self._memory is None:
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
        pieces = self._memory.tensors(self._num_bytes)[0].split([_whole(shape, self._dtype) for shape in self._shapes])
        return [piece.view(self._dtype)[: math.prod(shape)].view(shape)
                for piece, shape in zip(pieces, self._shapes, strict=True)]

    def fit(self, groups: Groups, dtype: torch.dtype, scratch: int = 0, device: torch.device | None = None) -> bool:
        """Return whether these are the copies, and this the scratch, that such layers need (arguments as of a new one).
        """
        is_here = not scratch or self._device == (device or torch.device("cpu"))
        return self._layout == _layout(groups, dtype) and self._scratch_size == scratch and is_here

    def refresh(self, groups: Groups, checksum: torch.Tensor | None) -> None:
        """Enqueue renewing the copies from the parameters that the layers have now, if these changed; does not wait.

        Args:
            checksum: ``[1]`` int64 on their device over all parameters, comparable with checksums of other calls: a
                GPU itself compares it with that of the last renewal. None: the copies are made in any case.
        """
        if not self.by_name:
            return
        known = None if checksum is None else self._checksum
        sources = [t for name in self.by_name for t in _tensors(groups[name], self._dtype)]
        self._plan(sources, None if known is None else checksum, known)
        if known is None or checksum is None:
            self._checksum = None if checksum is None else checksum.clone()
        else:
            known.copy_(checksum)

    def tensors(self) -> list[torch.Tensor]:
        """Return all copies, merged, and the scratch."""
        return [t for copied in (*self.by_name.values(), (self.scratch,)) for t in copied if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies' storages, each counted once."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return a tensor's bytes, rounded up so that the next tensor is aligned as torch's allocator would align it."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def copied_bytes(groups: Groups, dtype: torch.dtype) -> int:
    """Return the bytes that `CopiedWeights` would take."""
    return sum(t.numel() for _, linears in _to_copy(groups, dtype) for t in _tensors(linears, dtype)) * dtype.itemsize


def _to_copy(groups: Groups, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, linears in groups.items():
        if any(tensor.dtype != dtype for tensor in _tensors(linears, dtype)):
            yield name, linears


def can_be_copied(groups: Groups, dtype: torch.dtype) -> bool:
    """Return whether all are plain layers of an unsharded model, or 4-bit ones that compute in `dtype`, with biases in
    all or in none of each group."""
    known = all((type(linear) is nn.Linear and is_plain_linear(linear)) or packed_weight(linear, dtype) is not None
                for of in groups.values() for linear in of)
    return known and all(len({linear.bias is None for linear in linears}) == 1 for linears in groups.values())


def has_4bit(groups: Groups) -> bool:
    """Return whether a layer of these groups is a 4-bit one."""
    return any(is_4bit(linear) for linears in groups.values() for linear in linears)


def may_have_4bit() -> bool:
    """Return whether bitsandbytes is loaded: else there can be no 4-bit layer."""
    return _BITSANDBYTES in sys.modules


def is_4bit(layer: nn.Module) -> bool:
    """Return whether a layer is bitsandbytes' `Linear4bit`, whose code may be patched and whose settings any."""
    home = sys.modules.get(_BITSANDBYTES)
    return home is not None and type(layer) in (getattr(home, name, None) for name in _LINEARS)


def packed_weight(layer: Any, dtype: torch.dtype) -> Packed4Bit | None:
    """Return the weight of a 4-bit layer that multiplies inputs of `dtype` in that dtype, else None.

    None, too, if the layer has hooks or patched code, if it has not quantized its weight yet, if its forward has yet to
    hand the layer's scales to the weight, where changes of them are seen (as behind FSDP), if a block of one scale
    crosses rows (bitsandbytes 0.50.2 reads other scales then on a CPU), and if the bytes were laid out anew for a CPU.
    """
    if not is_4bit(layer) or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return None
    state = vars(layer.weight).get("quant_state")
    if state is None or getattr(state, "packing_format_for_cpu", False) or patched_class((type(layer),)) is not None:
        return None
    # The first input sets the dtype where none is set.
    computes_in = layer.compute_dtype if layer.compute_type_is_set or dtype == torch.float16 else dtype
    shape, is_known = torch.Size(state.shape), state.quant_type in ("nf4", "fp4")
    # Versions before `gemm_4bit` round to the dtype of the weight that was quantized first.
    rounds_twice = state.dtype != dtype and not hasattr(torch.ops.bitsandbytes, "gemm_4bit")
    if computes_in not in (dtype, None) or not is_known or rounds_twice or len(shape) != 2:
        return None
    if shape != torch.Size((layer.out_features, layer.in_features)) or shape[1] % state.blocksize or state.code is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        data = layer.weight.detach().reshape(-1).view(torch.uint8)
    nested = None
    if state.nested:
        nested = NestedScales(state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize)
    return Packed4Bit(data, shape, state.code, state.absmax, state.blocksize, nested)


def _weight(linear: Any, dtype: torch.dtype) -> torch.Tensor | Packed4Bit:
    packed = packed_weight(linear, dtype)
    return linear.weight if packed is None else packed


def _tensors(linears: tuple[Any, ...], dtype: torch.dtype) -> list[torch.Tensor | Packed4Bit]:
    """Return weights, then biases."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [*(_weight(linear, dtype) for linear in linears), *biases]


def _layout(groups: Groups, dtype: torch.dtype) -> tuple[torch.dtype, list[tuple]]:
    found = _to_copy(groups, dtype)
    return dtype, [(name, [(t.shape, t.device) for t in _tensors(linears, dtype)]) for name, linears in found]
