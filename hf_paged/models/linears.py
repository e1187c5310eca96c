"""Linear layers of a dense decoder as its steps multiply with them: by own, merged or cast weights, with LoRA or not.

`DecoderLinears` reads the layers off a model and keeps what is made of their weights. `LinearView` is what a step uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_paged.device.adjacent import AdjacentMemory, adjacent_memory
from hf_paged.guards.snapshot import tensors_inside
from hf_paged.kernels.layer.linear_4bit import Packed4BitGroup
from hf_paged.kernels.layer.silu_mul import silu_mul_host
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_silu_mul
from hf_paged.models.copied_weights import CopiedWeights, Copies, can_be_copied, is_4bit
from hf_paged.models.layer_ops import PACKED, LayerOps, apply_linear, is_plain_linear, row_product
from hf_paged.models.lora import AdaptedLayers, Adapters
from hf_paged.models.merged import MergedWeight, keep_alive, merge
from hf_paged.models.packed.dequantizing import WeightsPlan, packed_group
from hf_paged.models.tuners import AdapterRows
from hf_paged.parallel.group import SINGLE, ParallelGroup

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
QKV_GROUP, MLP_GROUP = ".qkv", ".mlp"  # these end the name of a layer's group of q, k, v, and of gate, up
HEAD = "lm_head"

# On a CPU copying products of so few rows is faster than writing them into columns of one tensor.
_FEW_ROWS = 8


class LinearView(NamedTuple):
    """Linear layers over the same input, checked before, and what a step multiplies with in place of them.

    `weight` [sum n_i, k] and `bias` are the layers' merged or cast ones, or `weight` is their bytes of 4-bit numbers;
    with None the layers' own are read in every step. With `lora` the layers are base layers, and the kernel that reads
    their product adds the LoRA update.
    `linear` multiplies; it returns parts of the product (`linear_parts`) if the kernel that reads these sums them.
    """

    linears: tuple[Any, ...]
    weight: torch.Tensor | Packed4BitGroup | None
    bias: torch.Tensor | None
    are_plain: bool
    lora: AdaptedLayers | None
    linear: Callable[..., torch.Tensor]
    ops: LayerOps

    def __call__(self, hidden: torch.Tensor, rows: AdapterRows | None = None,
                 shrunk: torch.Tensor | None = None) -> tuple[torch.Tensor, ParallelGroup, Delta | None]:
        """Compute [T, k] -> [T, sum of outputs], or parts of it.

        Args:
            rows: adapters of the rows; None: the active ones.
            shrunk: see `AdaptedLayers.delta`.

        Returns:
            The product, the ranks whose products still have to be summed, and the LoRA update still to be added.
        """
        delta = None if self.lora is None else self.lora.delta(hidden, rows, shrunk)
        if self.weight is not None:
            return self.linear(hidden, self.weight, self.bias), SINGLE, delta
        layer, *others = self.linears
        if others:
            return self._product(hidden, rows), SINGLE, delta
        if self.are_plain:
            return self.linear(hidden, layer.weight, layer.bias), SINGLE, delta
        return *row_product(layer, hidden, self.ops.linear, rows), delta

    def silu_mul(self, hidden: torch.Tensor, rows: AdapterRows | None,
                 following: AdaptedLayers | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute silu(gate) * up of a gate and an up projection: [T, k] -> [T, inner].

        The second result is its shrunk form for the `following` layers, if they add anything and one kernel for both is
        cheaper, else None.
        """
        if self.lora is not None and (delta := self.lora.delta(hidden, rows)) is not None:
            table = None if following is None else following.table(rows)
            return lora_expand_silu_mul(self._product(hidden, rows), *delta, table)
        if self.weight is not None and self.bias is None:
            return self.ops.linear_silu_mul(hidden, self.weight), None
        if self.weight is None and self.are_plain and hidden.device.type == "cpu":
            return silu_mul_host(*self._products(hidden)), None
        return self.ops.silu_mul(self._product(hidden, rows)), None

    def _product(self, hidden: torch.Tensor, rows: AdapterRows | None) -> torch.Tensor:
        if self.weight is not None:
            return self.linear(hidden, self.weight, self.bias)
        if self.are_plain and hidden.device.type == "cpu":
            if len(hidden) > _FEW_ROWS and all(linear.bias is None for linear in self.linears):
                return _side_by_side(hidden, [linear.weight for linear in self.linears])
            return torch.cat(self._products(hidden), dim=-1)
        return torch.cat([apply_linear(layer, hidden, self.ops.linear, rows) for layer in self.linears], dim=-1)

    def _products(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [F.linear(hidden, linear.weight, linear.bias) for linear in self.linears]

    def is_same(self, other: LinearView) -> bool:
        """Return whether a step computes the same with both."""
        return self.linears == other.linears and all(a is b for a, b in zip(self[1:], other[1:], strict=True))


def _side_by_side(hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Compute each product in its columns of one tensor: on a CPU as fast as one product over merged weights."""
    sizes = [len(weight) for weight in weights]
    products = hidden.new_empty((len(hidden), sum(sizes)))
    for weight, columns in zip(weights, products.split(sizes, dim=1), strict=True):
        torch.mm(hidden, weight.t(), out=columns)
    return products


class DecoderLinears:
    """Linear layers of a decoder, as they were last read, with the adapters, merged weights and copies made of them.

    Keeps the layers alive until `drop_references`.
    """

    def __init__(self) -> None:
        self.adapters: Adapters | None = None  # None: not read yet
        self.copied: CopiedWeights | None = None
        self._groups: dict[str, tuple[nn.Module, ...]] = {}
        self._packed: dict[str, Packed4BitGroup] = {}
        self._memory: AdjacentMemory | None = None
        self._merged: dict[str, MergedWeight] = {}
        self._held: list[torch.Tensor] = []  # keeps what merged tensors read if a parameter is re-pointed

    def read(self, model: Any, layers: Sequence[Any], device: torch.device, *, by_tables: bool, names: Sequence[str],
             autocast: torch.dtype | None) -> None:
        """Read layers and adapters anew; keeps tables of adapters if these are unchanged.

        Args:
            by_tables: apply LoRA by kernels; otherwise PEFT's layers run as they stand.
            names: adapters of entries 1, 2, ...
            autocast: dtype to which the calls cast.
        """
        groups: dict[str, tuple[nn.Module, ...]] = {}
        for i, layer in enumerate(layers):
            groups |= _groups_of(i, layer)
        found = Adapters(list(groups.values()) if by_tables else [], names, autocast)
        if self.adapters is not None and found.key == self.adapters.key:
            found.take_over(self.adapters)
        else:
            found.load(device)
        self.adapters, self._groups = found, groups | {HEAD: (model.lm_head,)}

    def bases(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the layers whose products are computed, by group: of a LoRA layer the base layer, if kernels add the
        update."""
        return {key: self._bases(linears) for key, linears in self._groups.items()}

    def _bases(self, linears: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
        return tuple(map(self.adapters.base, linears)) if self.adapters else linears

    def packed_bases(self, dtype: torch.dtype) -> dict[str, tuple[nn.Module, ...]]:
        """Return the groups of `bases` with 4-bit layers that can be copied in this dtype, in which they compute."""
        return {key: linears for key, linears in self.bases().items()
                if any(map(is_4bit, linears)) and can_be_copied({key: linears}, dtype)}

    def make(self, plan: WeightsPlan) -> None:
        """Make copies of groups of `bases` where they do not fit the layers any more, which `CopiedWeights.refresh`
        fills, and look up the bytes of other groups."""
        if not plan.copied and not plan.packed:
            self.copied, self._packed = None, {}
            return
        made_for = plan.copied, plan.dtype, plan.scratch, plan.device
        if self.copied is None or not self.copied.fit(*made_for):
            self.copied, self._packed = None, {}  # first: memory may not hold both
            self.copied = CopiedWeights(*made_for)
        self.copied.restore()
        self._packed = self._packed_of(plan)

    def is_made(self, plan: WeightsPlan) -> bool:
        """Return whether `make` would change nothing."""
        if self.copied is None:
            return not plan.copied and not plan.packed
        fits = self.copied.is_here and self.copied.fit(plan.copied, plan.dtype, plan.scratch, plan.device)
        return fits and list(map(id, self._packed_of(plan).values())) == list(map(id, self._packed.values()))

    def _packed_of(self, plan: WeightsPlan) -> dict[str, Packed4BitGroup]:
        """Return the bytes of a plan's groups; where these lie as they did, the objects that there are."""
        found: dict[str, Packed4BitGroup] = {}
        scratch = None if self.copied is None else self.copied.scratch
        for key, linears in plan.packed.items():
            if scratch is not None and (group := packed_group(linears, plan.dtype, scratch)) is not None:
                before = self._packed.get(key)
                found[key] = before if before is not None and group.is_same(before) else group
        return found

    def copies(self) -> Mapping[str, Copies]:
        """Return the copies by group."""
        return {} if self.copied is None else self.copied.by_name

    def merge(self, model: nn.Module, device: torch.device) -> bool:
        """Merge unmerged parameters layer by layer, since the device may not hold all weights twice.

        Returns whether a merged weight was made or dropped.
        """
        if self._memory is None or self._memory.device != device:
            self._memory = adjacent_memory(device)
        before = self._merged
        if self._memory is not None:
            held = set(map(id, tensors_inside(model)[0]))
            self._merged = {key: merged for key, merged in before.items() if merged.lies_in(held)}
            by_layer: dict[str, dict[str, tuple[nn.Module, ...]]] = {}
            for key, linears in self._groups.items():
                if len(linears) > 1 and key not in self._merged and key not in self.copies():
                    by_layer.setdefault(key.partition(".")[0], {})[key] = self._bases(linears)
            for groups in by_layer.values():
                found = zip(groups, merge(list(groups.values()), self._memory), strict=True)
                self._merged |= {key: merged for key, merged in found if merged is not None}
            self._memory.finish()
        return self._merged != before

    def keep_merged_alive(self) -> None:
        """Keep the memory that merged weights read now, even if a parameter is re-pointed later."""
        weights = [weight for merged in self._merged.values() for weight in merged.weights]
        self._held = keep_alive(weights, self._held)

    def view(self, key: str, ops: LayerOps, *, joins: bool) -> LinearView | None:
        """Return a group's view, with copies, or with the merged weight if the merged parameters still lie in it.

        None if the layer has no such group. `joins`: the kernel that reads the product of few rows may sum its parts.
        """
        if key not in self._groups:
            return None
        linears = self._groups[key]
        lora = self.adapters.group(linears) if self.adapters else None
        linears = self._bases(linears)
        if (copies := self.copies().get(key)) is not None:
            return LinearView(linears, copies.weight, copies.bias, True, lora, ops.linear, ops)
        if (packed := self._packed.get(key)) is not None:
            in_parts = joins and not key.endswith(MLP_GROUP) and lora is None
            return LinearView(linears, packed, None, False, lora, PACKED.linear_parts if in_parts else PACKED.linear,
                              PACKED)
        merged, are_plain = self._merged.get(key), all(map(is_plain_linear, linears))
        weight = merged.current() if merged is not None and merged.belongs_to(linears) else None
        in_parts = joins and are_plain and lora is None and not key.endswith(MLP_GROUP)
        return LinearView(linears, weight, None, are_plain, lora, ops.linear_parts if in_parts else ops.linear, ops)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that steps read and that other tensors may replace: copies, and tables of adapters."""
        copies = [] if self.copied is None else self.copied.tensors()
        return copies if self.adapters is None else [*copies, *self.adapters.tensors()]

    def drop_references(self) -> None:
        """Release layers and memory until `read`; the copies' addresses stay if the device can map memory."""
        self._groups, self._merged, self._packed, self._held = {}, {}, {}, []
        if self.copied is not None and not self.copied.unmap():
            self.copied = None


def _groups_of(i: int, layer: Any) -> dict[str, tuple[nn.Module, ...]]:
    """Return the linear layers of a decoder layer by input, without experts."""
    groups: dict[str, tuple[nn.Module, ...]] = {
        f"{i}{QKV_GROUP}": tuple(getattr(layer.self_attn, name) for name in QKV),
        f"{i}.o_proj": (layer.self_attn.o_proj,),
    }
    if not has_experts(layer.mlp):
        groups[f"{i}{MLP_GROUP}"] = tuple(getattr(layer.mlp, name) for name in GATE_UP)
        groups[f"{i}.down_proj"] = (layer.mlp.down_proj,)
    return groups


def has_experts(mlp: Any) -> bool:
    """Return whether an MLP is a block of experts."""
    return "experts" in mlp._modules
