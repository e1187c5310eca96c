"""A step of one row as one launch over all layers, where a decoder is as the kernel for that takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.kernels.attention.metadata import PagedMetadata
from hf_paged.kernels.one_row_layers import (
    LayerPointers,
    LayersShape,
    Workspace,
    one_row_layers_unchecked,
    takes,
)
from hf_paged.kernels.upload import upload
from hf_paged.models.base import StepContext
from hf_paged.models.plain_linear import RowProduct


class OneRowLayers:
    """The kernel's table of what the layers are, and the memory that its launches share.

    Both stay where they are, since CUDA graphs read them: what lies elsewhere than before is written into the table.
    """

    def __init__(self) -> None:
        self._shape: LayersShape | None = None
        self._pointers: list[int] = []
        self._table: torch.Tensor | None = None
        self._workspace: Workspace | None = None

    def __call__(self, hidden: torch.Tensor, step: StepContext, meta: PagedMetadata, layers: Sequence[Any],
                 qkv: Sequence[Any], gate_up: Sequence[Any], norm: Any, cos: torch.Tensor,
                 sin: torch.Tensor) -> torch.Tensor | None:
        """The embedding [1, hidden] to the final norm's result, or None where some layer is not as the kernel takes it.

        `layers`, `qkv` and `gate_up` are `LayerParts` and `Projections` of each layer. `meta` is the row's.
        """
        if not layers:
            return None
        parts = zip(layers, qkv, gate_up, strict=True)
        tensors = [_tensors(*layer, *step.kv_cache(i)) for i, layer in enumerate(parts)]
        found: list[LayerPointers] = [one for one in tensors if one is not None]
        epsilons = _epsilons(layers, norm)
        if len(found) < len(tensors) or epsilons is None or not self._fits(hidden, found, norm.weight):
            return None
        assert self._shape is not None and self._table is not None and self._workspace is not None
        return one_row_layers_unchecked(
            hidden, self._shape, self._table, norm.weight, *epsilons, cos, sin, step.positions, meta.slots,
            step.slot_mapping, meta.block_table, layers[0].options.scale, self._workspace,
        )

    def _fits(self, hidden: torch.Tensor, layers: list[LayerPointers], norm: torch.Tensor) -> bool:
        """Bring the table up to what the layers are now; False where the kernel does not take them."""
        pointers = [0 if tensor is None else tensor.data_ptr() for layer in layers for tensor in layer]
        if pointers == self._pointers and hidden.shape[1] == len(norm):
            return True
        shape = _shape_of(layers)
        if shape is None or hidden.dtype != norm.dtype or not takes(shape, hidden.dtype, hidden.device):
            return False
        if any(address % 16 for address in pointers) or norm.data_ptr() % 16:
            return False
        table = upload(torch.tensor(pointers).view(len(layers), -1).numpy(), hidden.device)
        if self._table is None or shape != self._shape or self._table.device != hidden.device:
            self._table, self._shape, self._workspace = table, shape, Workspace(shape, hidden.device)
        else:
            self._table.copy_(table)
        self._pointers = pointers
        return True


def _tensors(layer: Any, qkv: Any, gate_up: Any, k_cache: torch.Tensor, v_cache: torch.Tensor) -> LayerPointers | None:
    """What a layer computes with, where it is nothing but products with weights, norms and plain attention."""
    options = layer.options
    if gate_up is None or not layer.has_silu or (options.window, options.softcap, options.sinks) != (None, None, None):
        return None
    if any(merged.weight is None or merged.bias is not None or merged.lora is not None for merged in (qkv, gate_up)):
        return None
    rows = layer.o_proj, layer.down_proj
    if not all(type(row) is RowProduct and row.is_plain and row.lora is None and row.module.bias is None
               for row in rows):
        return None
    q_norm, k_norm = (None, None) if layer.head_norms is None else (norm.weight for norm in layer.head_norms)
    return LayerPointers(qkv.weight, layer.o_proj.module.weight, gate_up.weight, layer.down_proj.module.weight,
                         layer.input_norm.weight, layer.post_norm.weight, q_norm, k_norm, k_cache, v_cache)


def _epsilons(layers: Sequence[Any], norm: Any) -> tuple[float, float | None] | None:
    """Of the norms of rows and of those of heads (None: there are none), where all are alike; and so is attention."""
    rows = {norm.variance_epsilon}
    heads: set[float | None] = set()
    for layer in layers:
        rows |= {layer.input_norm.variance_epsilon, layer.post_norm.variance_epsilon}
        heads |= {None} if layer.head_norms is None else {one.variance_epsilon for one in layer.head_norms}
    if len(rows) > 1 or len(heads) > 1 or len({layer.options.scale for layer in layers}) > 1:
        return None
    return rows.pop(), heads.pop()


def _shape_of(layers: list[LayerPointers]) -> LayersShape | None:
    """None where the layers are not all of one shape and dtype, or not contiguous."""
    first = layers[0]
    alike = all(
        (a is None) == (b is None) and (a is None or (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device))
        for layer in layers for a, b in zip(layer, first, strict=True)
    )
    dtypes = {tensor.dtype for tensor in first if tensor is not None}
    if not alike or len(dtypes) > 1:
        return None
    if not all(tensor.is_contiguous() for layer in layers for tensor in layer if tensor is not None):
        return None
    block_size, kv_heads, head_dim = first.k_cache.shape[1:]
    hidden, width = first.o.shape
    return LayersShape(len(layers), hidden, width // head_dim, kv_heads, head_dim, first.down.shape[1], block_size)
