"""PEFT's LoRA over linear layers, as fused layers compute it: two launches for all layers that read one input.

Follows `peft.tuners.lora.layer.Linear.forward` and `_mixed_batch_forward` of PEFT 0.18 to 0.21, and their like for
quantized base layers, with their rounding but for sums that a kernel keeps in float32. Kernels read adapters in place,
so a trained adapter needs no renewal. This file never imports PEFT; other tuners and LoRA's variants (DoRA) are called
as they stand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.guards.hooks import has_only_names
from hf_paged.guards.original_classes import patched_class
from hf_paged.guards.quantized import is_quantized_forward
from hf_paged.guards.tokenwise import row_mixing_of_layer
from hf_paged.kernels._triton import triton
from hf_paged.kernels.lora.lora_expand import Delta
from hf_paged.kernels.lora.lora_order import RowOrder
from hf_paged.kernels.lora.lora_shrink import lora_shrink
from hf_paged.kernels.lora.lora_table import Adapter, Entry, LoraTable, Members, make_tables
from hf_paged.models.layer_ops import is_plain_linear
from hf_paged.models.tuners import AdapterRows, is_adapted, is_lora

_MODULE = "peft.tuners.lora.layer"
# Classes of LoRA layers, and whether they round an adapter's update to the result's dtype before they add it.
_CLASSES = (
    (_MODULE, "Linear", False), ("peft.tuners.lora.torchao", "TorchaoLoraLinear", False),
    ("peft.tuners.lora.gptq", "GPTQLoraLinear", False), ("peft.tuners.lora.hqq", "HqqLoraLinear", False),
    ("peft.tuners.lora.bnb", "Linear4bit", True), ("peft.tuners.lora.awq", "AwqLoraLinear", True),
    ("peft.tuners.lora.aqlm", "AqlmLoraLinear", True),
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LoraLayer(NamedTuple):
    """LoRA layer as it was read: the layer inside, its adapters by name, names of the active adapters, and whether an
    update is rounded before it is added."""

    base: Any
    adapters: dict[str, Adapter]
    active: tuple[str, ...]
    rounds_delta: bool

    def key(self) -> tuple:
        """Return a key that stays equal as long as the layer computes the same from tensors at the same places."""
        adapters = [(name, adapter.key()) for name, adapter in self.adapters.items()]
        return id(self.base), self.rounds_delta, self.active, adapters


def is_loaded() -> bool:
    """Return whether PEFT's LoRA is imported: else there can be no LoRA layer."""
    return _MODULE in sys.modules


def _classes() -> dict[type, bool]:
    """Return the loaded classes of LoRA layers, and whether they round updates before they add them."""
    found = ((getattr(sys.modules.get(module), name, None), rounds) for module, name, rounds in _CLASSES)
    return {kind: rounds for kind, rounds in found if kind is not None}


def is_patched() -> bool:
    """Return whether a class of PEFT's LoRA layers is patched: then these run as they stand."""
    return patched_class(_classes()) is not None


def find_layers(groups: Iterable[Iterable[nn.Module]]) -> dict[int, LoraLayer]:
    """Return, by id, the modules that are LoRA layers this file supports.

    None if their adapters differ in dtype, and none of a group whose layers round differently.
    """
    kinds = _classes()
    candidates = [[module for module in group if type(module) in kinds] for group in groups]
    if not any(candidates) or is_patched():
        return {}
    layers: dict[int, LoraLayer] = {}
    for group in candidates:
        found = {id(module): layer for module in group if (layer := _read(module, kinds[type(module)])) is not None}
        if len({layer.rounds_delta for layer in found.values()}) <= 1:
            layers |= found
    dtypes = {adapter.a.dtype for layer in layers.values() for adapter in layer.adapters.values()}
    return layers if len(dtypes) <= 1 else {}


def _read(module: Any, rounds_delta: bool) -> LoraLayer | None:
    """Read a LoRA layer; returns None if its forward is more than the base's product and that of plain adapters."""
    base = module.base_layer
    if not _is_base(base) or not _is_bare(module):
        return None
    if module.lora_variant or not module.cast_input_dtype_enabled:
        return None
    if module.disable_adapters or module.merged:
        # A disabled layer with merged adapters would unmerge them in its forward.
        merged = module.disable_adapters and module.merged
        return None if merged else LoraLayer(base, {}, (), rounds_delta)
    adapters: dict[str, Adapter] = {}
    for name in module.lora_A:
        if (adapter := _adapter(module, name, base)) is None:
            return None
        adapters[name] = adapter
    return LoraLayer(base, adapters, tuple(name for name in module.active_adapters if name in adapters), rounds_delta)


def _is_base(base: Any) -> bool:
    """Return whether a base layer is plain, or a quantized one that is called as it stands (or copied)."""
    if type(base) is nn.Linear and type(base.weight) is nn.Parameter and base.weight.is_floating_point():
        return is_plain_linear(base) or is_quantized_forward(base)
    known = all(isinstance(getattr(base, name, None), int) for name in ("in_features", "out_features"))
    return known and row_mixing_of_layer(base) is None and not is_adapted(base) and _is_bare(base)


def _adapter(module: Any, name: str, base: Any) -> Adapter | None:
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    plain = is_plain_linear(a) and is_plain_linear(b) and a.bias is None and type(a) is type(b) is nn.Linear
    if not plain or type(dropout) not in (nn.Identity, nn.Dropout) or not _is_bare(dropout):
        return None
    device = next((t.device for t in (*base.parameters(), *base.buffers())), a.weight.device)
    tensors = [a.weight, b.weight, *([] if b.bias is None else [b.bias])]
    alike = {(t.dtype, t.device, t.is_contiguous()) for t in tensors} == {(a.weight.dtype, device, True)}
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


class AdaptedLayers:
    """Adapters of linear layers that read one input; kernels add their LoRA updates to the base layers' product.

    Entries of the table: the active adapters, then each adapter alone, by name.
    """

    def __init__(self, table: LoraTable, has_active: bool) -> None:
        """Keep the table; `has_active`: whether its first entry adds an update."""
        self._table, self._has_active = table, has_active

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors by which kernels find the adapters."""
        return [self._table.places, self._table.scales]

    def table(self, rows: AdapterRows | None) -> LoraTable | None:
        """Return the table of the rows' adapters; None if nothing is added to any row."""
        return self._table if rows is not None or self._has_active else None

    def delta(self, hidden: torch.Tensor, rows: AdapterRows | None,
              shrunk: torch.Tensor | None = None) -> Delta | None:
        """Return the update to add to the base layers' product of `hidden` [T, k]; None if there is none.

        To be called before that product is computed, which hides the latency of shrinking. `shrunk`: `hidden` times A,
        if the kernel that made `hidden` has computed it, too.
        """
        if (table := self.table(rows)) is None:
            return None
        order = _order(rows)
        return Delta(lora_shrink(hidden, table, order) if shrunk is None else shrunk, table, order)


def _order(rows: AdapterRows | None) -> RowOrder | None:
    if rows is None:
        return None
    assert rows.order is not None, "a step with adapters by row puts its rows in order first"
    return rows.order


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
        self._layers = find_layers(known)
        self._modules, self._names, self._autocast = groups, tuple(names), autocast
        self.key = [layer.key() for layer in self._layers.values()], (*self._names, autocast) if self._layers else ()
        self._groups: dict[tuple[int, ...], AdaptedLayers] = {}

    def take_over(self, other: Adapters) -> None:
        """Take over what `other`, of the same key, has loaded."""
        self._groups = other._groups

    def __bool__(self) -> bool:
        return bool(self._layers)

    def base(self, module: nn.Module) -> nn.Module:
        """Return the layer inside one of the LoRA layers; of any other module the module itself."""
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
        return Members((active, *named), tuple(columns), self._autocast or dtype, found[0].rounds_delta)
