"""PEFT's LoRA over plain linear layers, as fused layers compute it: two launches for all layers that read one input.

Follows `peft.tuners.lora.layer.Linear.forward` and `_mixed_batch_forward` of PEFT 0.18 to 0.21, with their rounding but
for sums that a kernel keeps in float32. Kernels read adapters in place, so a trained adapter needs no renewal. This
file never imports PEFT; other tuners and LoRA's variants (DoRA) are called as they stand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.guards.hooks import has_only_names
from hf_paged.guards.original_classes import patched_class
from hf_paged.kernels._triton import triton
from hf_paged.kernels.lora.lora_table import Adapter, Entry, Members, make_tables
from hf_paged.models.adapted_layers import AdaptedLayers
from hf_paged.models.layer_ops import is_plain_linear
from hf_paged.models.tuners import is_lora

_MODULE = "peft.tuners.lora.layer"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LoraLayer(NamedTuple):
    """LoRA layer as it was read: the plain layer inside, its adapters by name, and names of the active adapters."""

    base: nn.Linear
    adapters: dict[str, Adapter]
    active: tuple[str, ...]

    def key(self) -> tuple:
        """Return a key that stays equal as long as the layer computes the same from tensors at the same places."""
        return id(self.base), self.active, [(name, adapter.key()) for name, adapter in self.adapters.items()]


def is_loaded() -> bool:
    """Return whether PEFT's LoRA is imported: else there can be no LoRA layer."""
    return _MODULE in sys.modules


def _class() -> type | None:
    return getattr(sys.modules.get(_MODULE), "Linear", None)


def is_patched() -> bool:
    """Return whether the class of PEFT's LoRA layers is patched: then these run as they stand."""
    kind = _class()
    return kind is not None and patched_class((kind,)) is not None


def find_layers(modules: Iterable[nn.Module]) -> dict[int, LoraLayer]:
    """Return, by id, the modules that are LoRA layers this file supports; none if their adapters differ in dtype."""
    kind = _class()
    candidates = [module for module in modules if type(module) is kind]
    if not candidates or is_patched():
        return {}
    layers = {id(module): layer for module in candidates if (layer := _read(module)) is not None}
    dtypes = {adapter.a.dtype for layer in layers.values() for adapter in layer.adapters.values()}
    return layers if len(dtypes) <= 1 else {}


def _read(module: Any) -> LoraLayer | None:
    """Read a LoRA layer; returns None if its forward is more than the base's product and that of plain adapters."""
    base = module.base_layer
    if type(base) is not nn.Linear or not is_plain_linear(base) or not _is_bare(module):
        return None
    if module.lora_variant or not module.cast_input_dtype_enabled:
        return None
    if module.disable_adapters or module.merged:
        # A disabled layer with merged adapters would unmerge them in its forward.
        return None if module.disable_adapters and module.merged else LoraLayer(base, {}, ())
    adapters: dict[str, Adapter] = {}
    for name in module.lora_A:
        if (adapter := _adapter(module, name, base)) is None:
            return None
        adapters[name] = adapter
    return LoraLayer(base, adapters, tuple(name for name in module.active_adapters if name in adapters))


def _adapter(module: Any, name: str, base: nn.Linear) -> Adapter | None:
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    plain = is_plain_linear(a) and is_plain_linear(b) and a.bias is None and type(a) is type(b) is nn.Linear
    if not plain or type(dropout) not in (nn.Identity, nn.Dropout) or not _is_bare(dropout):
        return None
    tensors = [a.weight, b.weight, *([] if b.bias is None else [b.bias])]
    alike = {(t.dtype, t.device, t.is_contiguous()) for t in tensors} == {(a.weight.dtype, base.weight.device, True)}
    rank = len(a.weight)
    fits = a.weight.shape == (rank, base.in_features) and b.weight.shape == (base.out_features, rank)
    if not alike or not fits or a.weight.dtype not in _DTYPES:
        return None
    bias = None if b.bias is None else b.bias.detach()
    return Adapter(a.weight.detach(), b.weight.detach(), bias, float(module.scaling[name]))


def _is_bare(module: nn.Module) -> bool:
    hooked = module._forward_hooks or (module._forward_pre_hooks and not (is_lora(module) and has_only_names(module)))
    return not (hooked or "forward" in vars(module))


def reads_tables(device: torch.device) -> bool:
    """Return whether kernels compute LoRA on this device; otherwise PEFT's own operations do."""
    return device.type == "cuda" and triton is not None


def _num_outputs(module: nn.Module) -> int | None:
    """Return the columns of a layer's product, or None if its attributes do not say."""
    number = getattr(module, "out_features", None)
    return number if isinstance(number, int) else None


class Adapters:
    """LoRA layers of a decoder, as they were read at one time, with the tables by which kernels find them."""

    def __init__(self, groups: Sequence[Sequence[nn.Module]], names: Sequence[str] = (),
                 autocast: torch.dtype | None = None) -> None:
        """Read the LoRA layers off the modules.

        Args:
            groups: groups of linear layers that read one input; only these layers are read.
            names: adapters of entries 1, 2, ...
            autocast: dtype to which the calls cast.
        """
        known = [group for group in groups if all(_num_outputs(module) is not None for module in group)]
        self._layers = find_layers(module for group in known for module in group)
        self._modules, self._names, self._autocast = groups, tuple(names), autocast
        self.key = [layer.key() for layer in self._layers.values()], (*self._names, autocast) if self._layers else ()
        self._groups: dict[tuple[int, ...], AdaptedLayers] = {}

    def take_over(self, other: Adapters) -> None:
        """Take over what `other`, of the same key, has loaded."""
        self._groups = other._groups

    def __bool__(self) -> bool:
        return bool(self._layers)

    def base(self, module: nn.Module) -> nn.Module:
        """Return the plain layer inside one of the LoRA layers; of any other module the module itself."""
        layer = self._layers.get(id(module))
        return module if layer is None else layer.base

    def group(self, modules: Sequence[nn.Module]) -> AdaptedLayers | None:
        """Return the adapters of these modules that `load` found; None if their base layers compute everything."""
        return self._groups.get(tuple(map(id, modules)))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that `load` made, in a fixed order."""
        return [tensor for layers in self._groups.values() for tensor in layers.tensors()]

    def load(self, device: torch.device) -> None:
        """Send the addresses of the groups' adapters to the device."""
        members = {tuple(map(id, group)): self._members(group) for group in self._modules}
        found = {key: some for key, some in members.items() if some is not None}
        tables = make_tables(list(found.values()), device)
        for key, table in zip(found, tables, strict=True):
            self._groups[key] = AdaptedLayers(table, any(self._layers[i].active for i in key if i in self._layers))

    def _members(self, group: Sequence[nn.Module]) -> Members | None:
        """Return the members of a group's table; None if no layer of the group has an adapter now."""
        if not any(id(module) in self._layers for module in group):
            return None
        columns, found, first = [], [], 0
        for module in group:
            layer = self._layers.get(id(module))
            size = _num_outputs(module)
            assert size is not None
            if layer is not None and layer.adapters:
                columns.append((first, size))
                found.append(layer)
            first += size
        if not found:
            return None
        most = max(len(layer.active) for layer in found)
        active: Entry = tuple(
            tuple(layer.adapters[layer.active[p]] if p < len(layer.active) else None for layer in found)
            for p in range(most))
        named = tuple((tuple(layer.adapters.get(name) for layer in found),) for name in self._names)
        dtype = next(iter(found[0].adapters.values())).a.dtype
        return Members((active, *named), tuple(columns), self._autocast or dtype)
