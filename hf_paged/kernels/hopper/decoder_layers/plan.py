"""Where a decoder's weights and caches lie, as the kernel for all its layers wants it, and the launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_paged.kernels._triton import on_device_of
from hf_paged.kernels.attention._tile import LOG2_E
from hf_paged.kernels.hopper.decoder_layers.kernel import layers_kernel
from hf_paged.kernels.hopper.decoder_layers.shape import (
    FAR_BITS,
    HEAD_DIM,
    LINE,
    PAGE_POSITIONS,
    PROGRAMS,
    ROWS,
    LayerFields,
    LayersShape,
    kinds,
)

_MOST = 2**31 - 1  # lines from the first: a descriptor then says nothing of what lies where


class LayerTensors(NamedTuple):
    """What a layer reads, contiguous and bf16: weights [rows, columns] and caches [blocks, block size, Hkv, 128]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def check_layers(layers: list[LayerTensors]) -> None:
    """Raise ValueError for layers that the kernel would read or write outside of, or compute wrongly."""
    if len(layers) < 2:
        raise ValueError(f"layers: {len(layers)}; expected at least two")
    (hidden, inner), (_, block_size, kv_heads, head_dim) = layers[0].down.shape, layers[0].keys.shape
    for name, width in (("hidden", hidden), ("inner", inner)):
        # A program has an equal share of the rows, and takes eight of them at a time.
        if width < 8 * PROGRAMS or width % 512:
            raise ValueError(f"{name}={width}: expected a multiple of 512 from {8 * PROGRAMS} on")
    if head_dim != HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}: expected {HEAD_DIM}")
    if kv_heads not in (4, 8, 16, 32, 64, 128):
        raise ValueError(f"kv_heads={kv_heads}: expected a power of two from 4 to {PROGRAMS}")
    if block_size < 16 or block_size & block_size - 1:
        raise ValueError(f"block_size={block_size}: expected a power of two from 16 on")
    heads = layers[0].o.shape[1] // HEAD_DIM
    if heads not in (4, 8, 16, 32, 64, 128) or heads % kv_heads or heads // kv_heads > 6:
        raise ValueError(f"heads={heads}: expected a power of two up to {PROGRAMS}, at most six for a KV head")
    if any(t is not None and (t.dtype != torch.bfloat16 or not t.is_contiguous()) for layer in layers for t in layer):
        raise ValueError("layers: expected contiguous bfloat16 tensors")
    for name, tensors, unit in kinds(layers):
        lowest = min(t.data_ptr() for t in tensors)
        if lowest % 16 or any((t.data_ptr() - lowest) % unit for t in tensors):
            raise ValueError(f"{name}: expected all at multiples of {unit} bytes from the lowest")


class LayersPlan:
    """Where everything lies, as the kernel wants it; what it keeps from launch to launch.

    Args:
        layers: at least two, all of the same shapes.
        final_norm: [H] bf16.
        eps: of all norms.
        scale: of all layers' scores.
        rows: of the steps that it runs; a power of two up to 8.

    Raises:
        ValueError: the kernel does not take these layers, or not for so many rows.
    """

    def __init__(self, layers: list[LayerTensors], final_norm: torch.Tensor, eps: float, scale: float,
                 rows: int = 1) -> None:
        check_layers(layers)
        first = layers[0]
        device = first.qkv.device
        _, block_size, kv_heads, _ = first.keys.shape
        hidden, inner = first.down.shape
        self.shape = shape = LayersShape(hidden, inner, first.o.shape[1] // HEAD_DIM, kv_heads, len(layers),
                                         block_size, first.q_norm is not None, rows)
        if not shape.has_room:
            raise ValueError(f"rows={rows}: expected one of {ROWS} for which shared memory has room")
        *lines, cache = (min(tensors, key=torch.Tensor.data_ptr) for _, tensors, _ in kinds(layers))
        slot = 2 * kv_heads * HEAD_DIM
        # The last layer once more, since a layer's norm is looked up in the one before.
        self.table = torch.tensor([
            LayerFields(*((w.data_ptr() - lowest.data_ptr()) // (2 * LINE)
                          for w, lowest in zip(layer[:4], lines, strict=True)),
                        *((c.data_ptr() - cache.data_ptr()) // slot for c in layer[4:6]),
                        *(0 if norm is None else norm.data_ptr() for norm in layer[6:]),
                        *(c.data_ptr() for c in layer[4:6]))
            for layer in (*layers, layers[-1])], dtype=torch.int64, device=device)
        widths = shape.qkv + shape.mixed + 2 * hidden + inner
        self.words = torch.zeros(rows * widths, dtype=torch.int32, device=device)
        self.parts = torch.zeros(rows * shape.heads * shape.splits * (HEAD_DIM + 2), dtype=torch.int64, device=device)
        self.epoch = torch.ones(1, dtype=torch.int32, device=device)  # words of zeros are of no launch
        self.final_norm, self.eps, self.scale = final_norm, eps, scale
        layout, far = gl.NVMMASharedLayout(128, 16, 4), 1 << FAR_BITS - 1
        # Eight rows from any line on: the second dimension counts lines from the lowest weight, the third one rows.
        self.weights = [TensorDescriptor(lowest, [_MOST, _MOST, 8, LINE], [far, LINE, lowest.shape[1], 1],
                                         [1, shape.lines, 8, LINE], layout) for lowest in lines]
        self.cache = TensorDescriptor(cache, [_MOST, _MOST, kv_heads, HEAD_DIM],
                                      [far, kv_heads * HEAD_DIM, HEAD_DIM, 1], [1, PAGE_POSITIONS, 1, LINE], layout)

    def run(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
            positions: torch.Tensor, slot_mapping: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values to the caches, and return their normed hidden states.

        One launch at a time: they share words, parts and epoch.

        Args:
            hidden: [rows, H] bf16, embedded tokens, contiguous.
            cos, sin: [positions, 128] bf16, contiguous.
            slots: [rows] int, a row's line of `block_table`.
            positions: [rows] int, of a row's token; before it the caches hold as many. -1: padding.
            slot_mapping: [rows] int, where its key and value go; -1: nowhere.
            block_table: [lines, blocks] int32, of which blocks lie beside each other.

        Returns:
            [rows, H] bf16; of padding whatever comes.
        """
        out = torch.empty_like(hidden)
        with on_device_of(hidden):
            layers_kernel[(PROGRAMS,)](
                *self.weights, self.cache, hidden, out, self.table, self.words, self.parts, self.epoch, cos, sin,
                self.final_norm, slots, positions, slot_mapping, block_table, block_table.stride(0), self.eps,
                self.scale * LOG2_E, len(LayerFields._fields), self.shape, num_warps=8, launch_cooperative_grid=True,
            )
        return out
