"""Writing and reading of whole weights by the names of checkpoints, where each rank holds a part of a weight.

The names are those of the unsharded model's `state_dict`, and of checkpoints that keep the matrices of experts apart or
leave out the causal LM's prefix. With one rank the part is the whole weight.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import Shard, is_sharded, shard_of

# Bytes sent at a time, which is also what ranks need in memory for it.
CHUNK_BYTES = 64 << 20
# Frequencies in the layers of old checkpoints; transformers ignores them as well.
_IGNORED = (r"rotary_emb\.inv_freq",)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_EXPERT = re.compile(r"(?P<experts>.+)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
# Other names of these matrices in checkpoints that transformers converts.
_OTHER_PARTS = {".w1.weight": ".gate_proj.weight", ".w3.weight": ".up_proj.weight", ".w2.weight": ".down_proj.weight"}


class ShardRange(NamedTuple):
    """Part of the model that a checkpoint's tensor covers: a tensor by its first name, or an expert's matrix in it."""

    name: str
    expert: int | None = None
    part: int = 0


class WeightLocation(NamedTuple):
    """Destination of a checkpoint's tensor on this rank: the part of it that `shard` describes goes into `data`.

    `covers` is equal for two names of tied weights.
    """

    data: torch.Tensor
    shard: Shard
    covers: ShardRange

    def chunks(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Return ranges [start, stop) of rows of the whole tensor, of at most so many bytes or of one row."""
        rows = self.shard.shape[0]
        row_bytes = self.data.element_size() * int(torch.Size(self.shard.shape[1:]).numel())
        step = max(1, most_bytes // max(1, row_bytes))
        return ((start, min(start + step, rows)) for start in range(0, rows, step))

    def pairs(self, first: int, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of `data`, each with its values from the whole tensor's `rows`, which start at row `first`."""
        return _pairs(self.data, self.shard.dim, self.shard.spans(), first, rows)


class NamedWeights:
    """Tensors of a causal LM's `state_dict` on this rank, by name; to be made anew for every use."""

    def __init__(self, model: Any) -> None:
        self._model = model
        ignored = (*_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ()))
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._modules: dict[str, tuple[nn.Module, str]] = {}
        self._conversions: list[Any] | None = None
        self._names: dict[int, str] = {}  # by id of the tensor; of tied weights the first name
        for path, module in model.named_modules():
            for key, tensor in _own_tensors(module):
                name = f"{path}.{key}" if path else key
                self._modules[name] = module, key
                self._names.setdefault(id(tensor), name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over names in the order of `state_dict`, with one name for tied weights."""
        return iter(self._names.values())

    def is_ignored(self, name: str) -> bool:
        """Return whether a name is a tensor that a checkpoint may have and the model does not use, as in transformers.
        """
        return any(pattern.search(name) for pattern in self._ignored)

    def place(self, name: str) -> WeightLocation:
        """Return the place of a name; ValueError if there is no such name, or its tensor cannot be written."""
        if (found := self._find(name)) is None:
            name = self._converted(name)
            if (of_expert := _EXPERT.fullmatch(name)) is not None:
                return self._place_of_expert(name, of_expert)
            found = self._find(name)
        if found is None:
            near = difflib.get_close_matches(name, self._modules, 1)
            raise ValueError(f"{name!r} is no tensor of the model: expected names as in its state_dict, such as "
                             f"{near[0] if near else next(iter(self._modules))!r}")
        module, key, tensor = found
        _check_plain(name, module)
        shard, data = shard_of(module, key), tensor.data
        if not data.ndim:
            shard, data = Shard.whole((1,)), data.view(1)
        return WeightLocation(data, shard, ShardRange(self._names[id(tensor)]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor; ValueError as from `place`."""
        found = self._find(name)
        return tuple(found[2].shape) if found is not None and not found[2].ndim else self.place(name).shard.shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of the whole tensor."""
        tensor = self.tensor(name)
        size = self.place(name).shard.shape if self.is_cut(name) else tensor.shape
        return int(torch.Size(size).numel()) * tensor.element_size()

    def is_cut(self, name: str) -> bool:
        """Return whether each rank holds a part of the tensor."""
        return is_sharded(self._modules[name][0])

    def tensor(self, name: str) -> torch.Tensor:
        """Return this rank's part, as it lies in the model."""
        tensor: torch.Tensor = getattr(*self._modules[name])
        return tensor.detach()

    def missing(self, covered: Collection[ShardRange]) -> list[str]:
        """Return names that are not covered: of tied weights the first, of experts' matrices the common tensor if none
        of its matrices is covered."""
        found: dict[str, set[ShardRange]] = {}
        for covers in covered:
            found.setdefault(covers.name, set()).add(covers)
        names = []
        for name in self:
            if name not in found:
                names.append(name)
            elif ShardRange(name) not in found[name]:
                experts, _, fused = name.rpartition(".")
                names += [f"{experts}.{index}.{key}.weight" for index in range(len(self.tensor(name)))
                          for key, (tensor, part) in _PARTS.items()
                          if tensor == fused and ShardRange(name, index, part) not in found[name]]
        return names

    def _converted(self, name: str) -> str:
        """Return the model's name for a checkpoint's, by the renamings that transformers has for the model."""
        if self._conversions is None:
            self._conversions = get_model_conversion_mapping(self._model)
        for one in self._conversions:
            if type(one) is WeightRenaming:
                name, _ = one.rename_source_key(name)
            elif type(one) is WeightConverter:
                other = next((part for part in _OTHER_PARTS if name.endswith(part)), None)
                if other is not None and any(pattern.endswith(f"experts.*{other}") for pattern in one.source_patterns):
                    name = name.removesuffix(other) + _OTHER_PARTS[other]
        return name

    def _find(self, name: str) -> tuple[nn.Module, str, torch.Tensor] | None:
        for known in (name, f"{self._model.base_model_prefix}.{name}"):
            if (found := self._modules.get(known)) is not None:
                return *found, getattr(*found)
        return None

    def _place_of_expert(self, name: str, match: re.Match) -> WeightLocation:
        """Return the place of one expert's gate, up or down matrix, if the model keeps all experts in one tensor."""
        key, part = _PARTS[match["part"]]
        found = self._find(f"{match['experts']}.{key}")
        if found is None or not _keeps_gates_above_ups(found[0]):
            raise ValueError(f"{name!r} is no tensor of the model: expected names as in its state_dict")
        module, _, tensor = found
        _check_plain(name, module)
        shard, index = shard_of(module, key), int(match["index"])
        if index >= len(tensor):
            raise ValueError(f"{name!r}: expected one of {len(tensor)} experts")
        _, height, width = shard.shape
        inner = height // 2 if key == "gate_up_proj" else height
        if shard.dim == 0:  # this rank has the whole tensor
            shard = Shard(shard.shape, 1, tuple((p * inner, (p + 1) * inner) for p in range(height // inner)))
        start, stop = shard.ranges[part]
        data = tensor.data[index].narrow(shard.dim - 1, part * (stop - start), stop - start)
        own = Shard((inner, width), shard.dim - 1, ((start - part * inner, stop - part * inner),))
        return WeightLocation(data, own, ShardRange(self._names[id(tensor)], index, part))


def check_tensor(name: object, tensor: object, weights: NamedWeights) -> None:
    """Raise ValueError or TypeError if this pair of name and tensor cannot be written."""
    if not isinstance(name, str):
        raise TypeError(f"weights: expected pairs of a name and a tensor, got {type(name).__name__} for the name")
    if type(tensor) not in _PLAIN or getattr(tensor, "is_meta", False):
        found = f"a {type(tensor).__name__}" + (" without memory" if getattr(tensor, "is_meta", False) else "")
        raise TypeError(f"{name!r} is {found}: expected a torch.Tensor with the whole weight (of a DTensor: "
                        "full_tensor())")
    assert isinstance(tensor, torch.Tensor)
    shape = weights.shape(name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}: expected {shape}")
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise ValueError(f"{name!r} is {tensor.dtype}: expected a dtype of 16 bits or more")


def write(place: WeightLocation, tensor: torch.Tensor | None, group: ParallelGroup, *, compare: bool = False) -> bool:
    """Write this rank's part of a whole tensor, or return whether all ranks have its values already (`compare`).

    Args:
        tensor: whole tensor of any float dtype, on any device. None, on ranks > 0: rank 0's; every rank calls.
        group: group over which the tensor is sent; `SINGLE` if each rank has it.
        compare: compare only, and write nothing.
    """
    same = True
    with torch.no_grad():
        for start, stop in place.chunks(CHUNK_BYTES):
            shape = (stop - start, *place.shard.shape[1:])
            if tensor is not None and not group.is_parallel:
                rows = tensor.reshape(place.shard.shape)[start:stop]
            else:
                rows = torch.empty(shape, dtype=place.data.dtype, device=place.data.device)
                if tensor is not None:
                    rows.copy_(tensor.reshape(place.shard.shape)[start:stop])
                group.broadcast_tensor(rows)
            for own, given in place.pairs(start, rows):
                if compare:
                    same = same and torch.equal(own, given.to(own.device, own.dtype))
                else:
                    own.copy_(given)
    return not group.any(not same) if compare else same


def gather(weights: NamedWeights, name: str, group: ParallelGroup) -> torch.Tensor | None:
    """Return a whole weight on rank 0's host, as a copy; None on other ranks. Every rank has to call."""
    tensor = weights.tensor(name)
    if not weights.is_cut(name):
        return tensor.to("cpu", copy=True) if group.rank == 0 else None
    shard = weights.place(name).shard
    whole = torch.empty(shard.shape, dtype=tensor.dtype, device="cpu") if group.rank == 0 else None
    edges = group.all_gather_numbers([edge for pair in shard.ranges for edge in pair])
    part = WeightLocation(tensor, Shard.whole(tuple(tensor.shape)), ShardRange(name))
    for first, end in part.chunks(CHUNK_BYTES // group.size):
        rows = group.all_gather(tensor[first:end].contiguous().view(torch.uint8)).view(tensor.dtype)
        if whole is not None:
            for data, of_rank in zip(rows, edges, strict=True):
                of_it = shard._replace(ranges=tuple(zip(of_rank[::2], of_rank[1::2], strict=True)))
                back = [(start, own, size) for own, start, size in of_it.spans()]
                for piece, values in _pairs(whole, shard.dim, back, first, data):
                    piece.copy_(values)
    return whole


def _pairs(target: torch.Tensor, dim: int, spans: Iterable[tuple[int, int, int]], first: int,
           rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of `target`, each with its values from `rows`, the rows of another tensor from row `first` on.

    `spans`: (start in the target, start in the other tensor, size) along `dim`.
    """
    last = first + len(rows)
    for own, start, size in spans:
        if dim:
            yield target[first:last].narrow(dim, own, size), rows.narrow(dim, start, size)
        elif (low := max(start, first)) < (high := min(start + size, last)):
            yield target[own + low - start : own + high - start], rows[low - first : high - first]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own tensors in its state_dict, in order."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer


def _keeps_gates_above_ups(module: Any) -> bool:
    """Return whether gates stand above ups, and each expert's matrices are as in a linear layer."""
    gate_up, down = (getattr(module, key, None) for key in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None or not gate_up.ndim == down.ndim == 3:
        return False
    return bool(gate_up.shape[1] == 2 * down.shape[2] and gate_up.shape[2] == down.shape[1])


def _check_plain(name: str, module: nn.Module) -> None:
    """Raise ValueError if a module does not keep its weight as plain tensors of floats that it computes with."""
    for key, tensor in _own_tensors(module):
        if type(tensor) not in _PLAIN or not tensor.is_floating_point() or tensor.element_size() == 1:
            kind = type(tensor).__name__ if type(tensor) not in _PLAIN else tensor.dtype
            raise ValueError(f"{name!r} is of a quantized or distributed layer ({type(module).__name__}, whose {key} "
                             f"is {kind}): expected a layer that holds its weight in floats of 16 bits or more; load "
                             "the model unquantized to update its weights")
