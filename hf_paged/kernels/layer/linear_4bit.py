# mypy: disallow-untyped-defs=False
"""Products with weights of 4 bits in bitsandbytes' format that are in memory in no other form.

Up to `MAX_ROWS` rows one kernel dequantises in registers; for more rows pieces of the weights are dequantised into one
scratch, and multiplied by torch. The numbers are those of dequantising and multiplying, as a trainer's forward does:
each value is rounded to the dtype of x, products are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.device.cuda import num_multiprocessors
from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    prefetch_rows,
    require_triton,
    tl,
)
from hf_paged.kernels.dequantize_4bit import Packed4Bit, dequantized_reference, packed_error, packed_signature
from hf_paged.kernels.layer._splitk_linear import DotConfig, joined_dot_parts
from hf_paged.kernels.layer.silu_mul import silu_mul

MAX_ROWS = 64
SCRATCH_BYTES = 24 << 20  # which stay in the L2 of an H100 until they are overwritten
_MOST_WEIGHTS = 3
_PREFETCH_BYTES = 16 << 20  # as of other weights: larger ones might be out of L2 again before they are read
_PIECE = DotConfig(64, 128, 1, 4, 1)  # tiles of dequantising


class Packed4BitGroup(NamedTuple):
    """Weights [n_i, K] of one input, side by side, that :func:`fit` accepts.

    Attributes:
        weights: at most 3.
        biases: [n_i] of the dtype of the products, one for each weight; (): there are none.
        scratch: 1-D, of the dtype of the products, for 64 rows of K values at least, which products of many rows
            overwrite.
    """

    weights: tuple[Packed4Bit, ...]
    biases: tuple[torch.Tensor, ...]
    scratch: torch.Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of each weight's product."""
        return tuple(weight.shape[0] for weight in self.weights)

    def is_same(self, other: Packed4BitGroup | None) -> bool:
        """Return whether products of both read and write the same memory."""
        return other is not None and self.scratch is other.scratch and self._key() == other._key()

    def _key(self) -> Any:
        return packed_signature(self.weights), [bias.data_ptr() for bias in self.biases]

    def arguments(self) -> tuple[Any, ...]:
        """Return the kernels' argument of the weights: of each its tensors, and its rows."""
        biases = self.biases or (None,) * len(self.weights)
        return tuple(
            (weight.data, weight.code, weight.absmax, *(weight.nested[:3] if weight.nested else (None, None, None)),
             bias, weight.shape[0]) for weight, bias in zip(self.weights, biases, strict=True))

    def constants(self) -> dict[str, int]:
        """Return the kernels' constants."""
        first = self.weights[0]
        return {"COUNT": len(self.weights), "OF_SCALE": first.block_size,
                "NESTED_BLOCK": first.nested.block_size if first.nested else 0}


def fit(weights: Sequence[Packed4Bit]) -> bool:
    """Return whether the kernels take weights side by side: few, with rows of whole blocks of a power of 2 of values
    from 32 on, alike in all, and bytes that lie at multiples of 16."""
    size, width = weights[0].block_size, weights[0].shape[1]
    kinds = {(w.shape[1], w.block_size, None if w.nested is None else w.nested.block_size) for w in weights}
    are_blocks_whole = size >= 32 and size & (size - 1) == 0 and width % size == 0
    are_alike = len(weights) <= _MOST_WEIGHTS and len(kinds) == 1
    return are_blocks_whole and are_alike and all(
        w.data.data_ptr() % 16 == 0 and not packed_error(w) for w in weights)


def linear_4bit(x: torch.Tensor, group: Packed4BitGroup, bias: None = None) -> torch.Tensor:
    """``x @ dequantised weight.T + bias`` for weights side by side.

    Args:
        x: ``[T, K]`` of the scratch's dtype, bf16, fp16 or fp32; rows may be strided, the last dim is contiguous.
        group: the weights and their biases.
        bias: None, as of a linear layer of which `group` is the weight.

    Returns:
        ``[T, sum of n_i]``, x's dtype, rounded once behind the bias.
    """
    if not x.is_cuda:
        return linear_4bit_reference(x, group)
    if len(x) > MAX_ROWS:
        return dequantized_linear(x, group)
    return linear_4bit_triton(x, group)


def linear_4bit_parts(x: torch.Tensor, group: Packed4BitGroup, bias: None = None) -> torch.Tensor:
    """Compute :func:`linear_4bit`, or float32 ``[S, T, N]`` that are to be added up in order and rounded once."""
    if not x.is_cuda or len(x) > MAX_ROWS:
        return linear_4bit(x, group)
    return linear_4bit_parts_triton(x, group, fastest_config(len(x), group.sizes, x.shape[1], x.device))


def linear_4bit_silu_mul(x: torch.Tensor, group: Packed4BitGroup) -> torch.Tensor:
    """``silu(gate) * up`` of gates and ups, the two weights: ``[T, I]``."""
    return silu_mul(linear_4bit(x, group))


def linear_4bit_reference(x: torch.Tensor, group: Packed4BitGroup) -> torch.Tensor:
    """:func:`linear_4bit` in plain torch."""
    biases = group.biases or (None,) * len(group.weights)
    return torch.cat([F.linear(x, dequantized_reference(weight).to(x.dtype), bias)
                      for weight, bias in zip(group.weights, biases, strict=True)], dim=-1)


@jit()
def _pick(weights, member, FIELD: tl.constexpr, COUNT: tl.constexpr):
    found = weights[0][FIELD]
    for i in tl.static_range(1, COUNT):
        found = tl.where(member == i, weights[i][FIELD], found)
    return found


@jit()
def _place_of(weights, tile, COUNT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of a tile's weight, the tile's first row in it, and the weight's first row among all."""
    member = 0
    first = 0
    for i in tl.static_range(1, COUNT):
        rows = weights[i - 1][7]
        beyond = (member == i - 1) & (tile >= tl.cdiv(rows, BLOCK_N))
        tile = tl.where(beyond, tile - tl.cdiv(rows, BLOCK_N), tile)
        first = tl.where(beyond, first + rows, first)
        member = tl.where(beyond, i, member)
    return member, tile * BLOCK_N, first


@jit()
def _levels_and_shift(weights, member, NESTED_BLOCK: tl.constexpr, COUNT: tl.constexpr):
    levels = tl.load(_pick(weights, member, 1, COUNT) + tl.arange(0, 16))
    shift = 0.0
    if NESTED_BLOCK:
        shift = tl.load(_pick(weights, member, 5, COUNT))
    return levels, shift


@jit()
def _weight_tile(weights, member, levels, shift, row, start, k_end, K, dtype: tl.constexpr, NESTED_BLOCK: tl.constexpr,
                 OF_SCALE: tl.constexpr, COUNT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 EVEN_K: tl.constexpr):
    """Return values [BLOCK_N, BLOCK_K] of a weight from column `start` on, each rounded to dtype."""
    OF: tl.constexpr = OF_SCALE if OF_SCALE < BLOCK_K else BLOCK_K  # values with one scale
    SCALES: tl.constexpr = BLOCK_K // OF
    block = tl.arange(0, SCALES)
    data = tl.multiple_of(_pick(weights, member, 0, COUNT), 16).to(tl.pointer_type(tl.int32))
    scales = _pick(weights, member, 2, COUNT)
    at = (row * (K // OF_SCALE) + start // OF_SCALE)[:, None] + block[None, :]
    word = (block * (OF // 8))[:, None] + tl.arange(0, OF // 8)[None, :]  # of eight values
    word_at = data + (row * (K // 8) + start // 8)[:, None, None] + word[None, :, :]
    inside = ((start + block * OF < k_end) | EVEN_K)[None, :]
    words = tl.load(word_at, mask=inside[:, :, None], other=0)
    if NESTED_BLOCK:
        number = tl.load(scales + at, mask=inside, other=0).to(tl.int32)
        outer = tl.load(_pick(weights, member, 4, COUNT) + at // NESTED_BLOCK, mask=inside, other=0.0)
        scale = tl.load(_pick(weights, member, 3, COUNT) + number) * outer + shift
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0)
    # Of a word's bytes, first to last, the high half is the first value. Each join adds an inner dimension.
    high = tl.join(tl.join((words >> 4) & 15, (words >> 20) & 15), tl.join((words >> 12) & 15, (words >> 28) & 15))
    low = tl.join(tl.join(words & 15, (words >> 16) & 15), tl.join((words >> 8) & 15, (words >> 24) & 15))
    numbers = tl.reshape(tl.join(high, low), [BLOCK_N * BLOCK_K])
    values = tl.reshape(tl.gather(levels, numbers, 0), [BLOCK_N, SCALES, OF]) * scale[:, :, None]
    return tl.reshape(values, [BLOCK_N, BLOCK_K]).to(dtype)


@jit(varying_ints=("num_rows",))
def _linear_4bit_kernel(
    x, weights, out, num_rows, total, K, k_per_split, x_stride, COUNT: tl.constexpr, NESTED_BLOCK: tl.constexpr,
    OF_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):
    """out [num_rows, total], or of more splits float32 [splits, num_rows, total].

    The weights' rows are the rows of the products. `weights`: see `Packed4BitGroup.arguments`.
    """
    member, n_begin, first = _place_of(weights, tl.program_id(0), COUNT, BLOCK_N)
    split = tl.program_id(1)
    k_begin = split * k_per_split
    k_end = tl.minimum(k_begin + k_per_split, K)
    size = _pick(weights, member, 7, COUNT)
    if PREFETCH:
        data = _pick(weights, member, 0, COUNT)
        begin = data + (n_begin.to(tl.int64) * K + k_begin) // 2
        prefetch_rows(begin, tl.minimum(size - n_begin, BLOCK_N), (k_end - k_begin) // 2, K // 2)
    after_previous_kernel(PDL)
    levels, shift = _levels_and_shift(weights, member, NESTED_BLOCK, COUNT)
    n, row, k = n_begin + tl.arange(0, BLOCK_N), tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    n_inside, row_inside = n < size, row < num_rows
    weight_row = tl.where(n_inside, n, 0).to(tl.int64)
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(k_begin, k_end, BLOCK_K):
        x_mask = row_inside[None, :] if EVEN_K else row_inside[None, :] & (start + k < k_end)[:, None]
        x_tile = tl.load(x_at + start, mask=x_mask, other=0.0)
        weight = _weight_tile(weights, member, levels, shift, weight_row, start, k_end, K, x.dtype.element_ty,
                              NESTED_BLOCK, OF_SCALE, COUNT, BLOCK_N, BLOCK_K, EVEN_K)
        acc = tl.dot(weight, x_tile, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(_pick(weights, member, 6, COUNT) + n, mask=n_inside, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    at = (split * num_rows + row).to(tl.int64)[None, :] * total + (first + n)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=n_inside[:, None] & row_inside[None, :])


def linear_4bit_triton(x: torch.Tensor, group: Packed4BitGroup, config: DotConfig | None = None) -> torch.Tensor:
    """:func:`linear_4bit` of at most `MAX_ROWS` rows as one Triton launch, and one more where K is split."""
    config = config or fastest_config(len(x), group.sizes, x.shape[1], x.device)
    parts = linear_4bit_parts_triton(x, group, config)
    return parts if parts.dim() == 2 else joined_dot_parts(parts, None, x.dtype)


def linear_4bit_parts_triton(x: torch.Tensor, group: Packed4BitGroup, config: DotConfig) -> torch.Tensor:
    """:func:`linear_4bit_parts` of at most `MAX_ROWS` rows as one Triton launch."""
    require_triton()
    (num_rows, width), sizes = x.shape, group.sizes
    per_split = cdiv(cdiv(width, config.split_k), config.block_k) * config.block_k
    splits = cdiv(width, per_split)
    shape, dtype = ((num_rows, sum(sizes)), x.dtype) if splits == 1 else ((splits, num_rows, sum(sizes)), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return x.new_empty(num_rows, sum(sizes))
    options = pdl_options(x)
    few_bytes = sum(sizes) * width // 2 <= _PREFETCH_BYTES and config.block_n <= 32 * config.num_warps
    with on_device_of(x):
        _linear_4bit_kernel[(sum(cdiv(size, config.block_n) for size in sizes), splits)](
            x, group.arguments(), out, num_rows, sum(sizes), width, per_split, x.stride(0), **group.constants(),
            HAS_BIAS=bool(group.biases), ROWS=max(16, next_power_of_2(num_rows)), BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, EVEN_K=width % config.block_k == 0, PREFETCH=options["PDL"] and few_bytes,
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False, **options,
        )
    return out


def fastest_config(num_rows: int, sizes: tuple[int, ...], width: int, device: torch.device) -> DotConfig:
    """Return tiles for a product, and parts of K such that there are some four programs for each multiprocessor: the
    fastest ones on an H100 for the layers of Qwen3-8B."""
    block_n, block_k = (64, 128) if num_rows <= 32 else (128, 64)
    tiles, programs = sum(cdiv(size, block_n) for size in sizes), 4 * num_multiprocessors(device)
    splits = cdiv(programs, tiles) if num_rows <= 32 else programs // tiles
    return DotConfig(block_n, block_k, max(1, min(8, splits, width // 512)), 4, 3)


@jit()
def _dequantize_kernel(weights, out, first_tile, first_row, K, COUNT: tl.constexpr, NESTED_BLOCK: tl.constexpr,
                       OF_SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
                       PDL: tl.constexpr):
    """out [rows, K]: rows of the weights from the first of a tile on."""
    after_previous_kernel(PDL)
    member, n_begin, first = _place_of(weights, first_tile + tl.program_id(1), COUNT, BLOCK_N)
    levels, shift = _levels_and_shift(weights, member, NESTED_BLOCK, COUNT)
    start = tl.program_id(0) * BLOCK_K
    n, k = n_begin + tl.arange(0, BLOCK_N), start + tl.arange(0, BLOCK_K)
    n_inside = n < _pick(weights, member, 7, COUNT)
    tile = _weight_tile(weights, member, levels, shift, tl.where(n_inside, n, 0).to(tl.int64), start, K, K,
                        out.dtype.element_ty, NESTED_BLOCK, OF_SCALE, COUNT, BLOCK_N, BLOCK_K, EVEN_K)
    at = (first + n - first_row).to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + at, tile, mask=n_inside[:, None] & ((k < K) | EVEN_K)[None, :])


def dequantized_linear(x: torch.Tensor, group: Packed4BitGroup) -> torch.Tensor:
    """:func:`linear_4bit` of any number of rows by pieces in the scratch."""
    width, sizes = x.shape[1], group.sizes
    out = torch.empty(len(x), sum(sizes), dtype=x.dtype, device=x.device)
    bias = torch.cat(group.biases) if group.biases else None
    for first_tile, tiles, begin, end in _pieces(sizes, group.scratch.numel() // width):
        weight = group.scratch[: (end - begin) * width].view(-1, width)
        with on_device_of(x):
            _dequantize_kernel[(cdiv(width, _PIECE.block_k), tiles)](
                group.arguments(), weight, first_tile, begin, width, **group.constants(), BLOCK_N=_PIECE.block_n,
                BLOCK_K=_PIECE.block_k, EVEN_K=width % _PIECE.block_k == 0, num_warps=_PIECE.num_warps,
                enable_fp_fusion=False, **pdl_options(x))
        if bias is None:
            torch.mm(x, weight.t(), out=out[:, begin:end])
        else:  # torch's addmm into columns rounds otherwise
            out[:, begin:end] = F.linear(x, weight, bias[begin:end])
    return out


def _pieces(sizes: tuple[int, ...], most_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first tile, the number of tiles, the first row and the end of pieces of at most so many rows."""
    rows = (min(_PIECE.block_n, size - begin) for size in sizes for begin in range(0, size, _PIECE.block_n))
    ends = [0, *accumulate(rows)]
    first = 0
    for tile in range(1, len(ends)):
        if tile + 1 == len(ends) or ends[tile + 1] - ends[first] > most_rows:
            yield first, tile - first, ends[first], ends[tile]
            first = tile


def scratch_size(groups: Iterable[Sequence[tuple[int, int]]], dtype: torch.dtype) -> int:
    """Return the elements of a scratch for products of groups of weights of these shapes."""
    largest = max((sum(n * k for n, k in shapes) for shapes in groups), default=0)
    return min(largest, SCRATCH_BYTES // dtype.itemsize)
