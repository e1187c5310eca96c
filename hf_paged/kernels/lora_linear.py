# mypy: disallow-untyped-defs=False
"""x @ weight.T and what LoRA adds to it in one launch, for some hundred rows, alone or with silu(gate) * up behind it.

Each rounding is that of the two operations, `linear` and `lora_expand`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._device import shared_memory
from hf_paged.kernels._lora_tile import lora_dot, pointer_to, precision_of, table_options
from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    on_device_of,
    prefetch_options,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.linear import linear_unchecked
from hf_paged.kernels.lora_expand import (
    add_bias,
    add_delta,
    can_follow,
    lora_expand_silu_mul_unchecked,
    lora_expand_unchecked,
)
from hf_paged.kernels.lora_order import RowOrder
from hf_paged.kernels.lora_table import LoraTable
from hf_paged.kernels.silu_mul import silu_mul_tile

# Shared memory a block must be allowed for the tiles below.
_SHARED_MEMORY = 160 << 10


class LoraLinearConfig(NamedTuple):
    """Rows and columns of the product in a tile (with silu: as many gates as ups), of x; float32 products, launch."""

    block_m: int
    block_n: int
    block_k: int
    precision: str
    num_warps: int
    num_stages: int


@jit(varying_ints=("num_rows",))
def _lora_linear_kernel(
    x,
    weight,
    bias,
    shrunk,
    places,
    scales,
    out,
    next_places,
    next_scales,
    next_out,
    num_rows,
    K,
    first_0,
    first_1,
    first_2,
    size_0,
    size_1,
    size_2,
    x_stride,
    weight_stride,
    out_stride,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SILU: tl.constexpr,
    NEXT_RANK: tl.constexpr,
    NEXT_ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [num_rows, N]. HAS_BIAS: the weight's; ADDS_BIAS: an adapter's. The rest is as in `lora_expand`."""
    tile = tl.program_id(1)
    member = 0
    begin = first_0
    size = size_0
    if not SILU and MEMBERS > 1:
        tiles = tl.cdiv(size_0, BLOCK_N)
        beyond = tile >= tiles
        member = tl.where(beyond, 1, 0)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_1, first_0)
        size = tl.where(beyond, size_1, size_0)
    if not SILU and MEMBERS > 2:
        tiles = tl.cdiv(size_1, BLOCK_N)
        beyond = (member == 1) & (tile >= tiles)
        member = tl.where(beyond, 2, member)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_2, begin)
        size = tl.where(beyond, size_2, size)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = (n < size) | EVEN_N
    first_row = weight + (begin + tile * BLOCK_N).to(tl.int64) * weight_stride
    up_row = weight + (first_1 + tile * BLOCK_N).to(tl.int64) * weight_stride
    if PREFETCH:
        count = tl.where(tl.program_id(0) == 0, tl.minimum(size - tile * BLOCK_N, BLOCK_N), 0)
        bytes_each: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(first_row, count, K * bytes_each, weight_stride * bytes_each)
        if SILU:
            prefetch_rows(up_row, count, K * bytes_each, weight_stride * bytes_each)
    after_previous_kernel(PDL)

    dtype = out.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_rows
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = column[None, :] * weight_stride + k[:, None]
    base = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    base_up = base
    for start in range(0, K, BLOCK_K):
        k_inside = (start + k < K) | EVEN_K
        w_mask = None if EVEN_N and EVEN_K else n_inside[None, :] & k_inside[:, None]
        other = None if EVEN_N and EVEN_K else 0.0
        x_tile = tl.load(x_at + start, mask=inside[:, None] & k_inside[None, :], other=0.0)
        w = tl.load(first_row + w_at + start, mask=w_mask, other=other)
        base = tl.dot(x_tile, w, base, input_precision="ieee")
        if SILU:
            w_up = tl.load(up_row + w_at + start, mask=w_mask, other=other)
            base_up = tl.dot(x_tile, w_up, base_up, input_precision="ieee")
    if HAS_BIAS:
        base += tl.load(bias + begin + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    shrunk_rows = shrunk + row.to(tl.int64) * (PARTS * MEMBERS * RANK)
    split_stride = num_rows.to(tl.int64) * (PARTS * MEMBERS * RANK)
    result = base.to(dtype)  # as a product by itself is rounded
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = add_delta(acc, shrunk_rows, split_stride, places, 0, inside, member, n, n_inside, PARTS, MEMBERS, RANK,
                    BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, SPLITS)
    if ADDS_BIAS:
        acc = add_bias(acc, places, scales, 0, member, n, n_inside, PARTS, MEMBERS, KIND, COMPUTE)
    result = (result.to(tl.float32) + acc).to(dtype)
    if SILU:
        up = base_up.to(dtype)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = add_delta(acc, shrunk_rows, split_stride, places, 0, inside, 1, n, n_inside, PARTS, MEMBERS, RANK,
                        BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, SPLITS)
        if ADDS_BIAS:
            acc = add_bias(acc, places, scales, 0, 1, n, n_inside, PARTS, MEMBERS, KIND, COMPUTE)
        up = (up.to(tl.float32) + acc).to(dtype)
        result = silu_mul_tile(result.to(tl.float32), up.to(tl.float32), dtype, INTERPRETED)
        begin = 0
    if NEXT_RANK > 0:
        index = tl.arange(0, NEXT_RANK)
        a = pointer_to(tl.load(next_places), KIND, NEXT_ALIGNED)
        a_tile = tl.load(a + index[:, None] * size + n[None, :],
                         mask=(index < tl.load(next_places + 3))[:, None] & n_inside[None, :], other=0.0)
        sums = tl.zeros([BLOCK_M, NEXT_RANK], tl.float32)
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        x_next = result
        if LOW or not is_bfloat16:
            x_next = result.to(COMPUTE)
        sums = lora_dot(x_next, tl.trans(a_tile.to(COMPUTE)), sums, LOW, PRECISION, is_bfloat16)
        at = (tl.program_id(1) * num_rows + row).to(tl.int64) * NEXT_RANK
        tl.store(next_out + at[:, None] + index[None, :], sums * tl.load(next_scales), mask=inside[:, None])
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + (begin + n)[None, :], result,
             mask=inside[:, None] & n_inside[None, :])


def lora_linear_unchecked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shrunk: torch.Tensor, table: LoraTable,
    order: RowOrder | None,
) -> torch.Tensor:
    """``lora_expand(linear(x, weight, bias), shrunk, table, order)``: ``[T, N]``.

    Unchecked; the table's members make up the product or a part of it.
    """
    config = choose_config(x, weight, table, order)
    if config is None:
        return lora_expand_unchecked(linear_unchecked(x, weight, bias), shrunk, table, order)
    return lora_linear_triton(x, weight, bias, shrunk, table, config)[0]


def lora_linear_silu_mul_unchecked(
    x: torch.Tensor, weight: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, order: RowOrder | None,
    following: LoraTable | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``silu_mul(lora_linear(...))`` of gates and ups: ``[T, N / 2]``. `following` as in `lora_expand`."""
    config = choose_config(x, weight, table, order, silu=True)
    if config is None:
        product = linear_unchecked(x, weight, None)
        return lora_expand_silu_mul_unchecked(product, shrunk, table, order, following)
    if following is not None and not can_follow(following, triton.cdiv(len(weight) // 2, config.block_n)):
        following = None
    return lora_linear_triton(x, weight, None, shrunk, table, config, silu=True, following=following)


def choose_config(x: torch.Tensor, weight: torch.Tensor, table: LoraTable, order: RowOrder | None, *,
                  silu: bool = False) -> LoraLinearConfig | None:
    """What is fastest for these tensors; None: one launch for the product and one for what is added to it."""
    if triton is None or not x.is_cuda or order is not None or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or not _is_whole(table, len(weight), silu):
        return None
    if shared_memory(x.device) < _SHARED_MEMORY:
        return None
    outputs, width = weight.shape
    return fastest_config(len(x), outputs, width, precision_of(x.dtype), silu=silu)


def _is_whole(table: LoraTable, num_outputs: int, silu: bool) -> bool:
    """Do the members' columns, one after the other, make up the product?"""
    ends = [0, *(first + size for first, size in table.columns)]
    in_turn = all(first == end for (first, _), end in zip(table.columns, ends, strict=False))
    return in_turn and ends[-1] == num_outputs and (not silu or table.num_members == 2)


def fastest_config(rows: int, outputs: int, width: int, precision: str, *, silu: bool) -> LoraLinearConfig | None:
    """What an H200 wants (lora_speed.py) for x [rows, width] and a weight [outputs, width]."""
    if not 0 < rows <= 256 or outputs * width > 16 << 20:
        return None
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if silu:
        return LoraLinearConfig(block_m, 64, 64, precision, 8 if block_m == 64 else 4, 4)
    if outputs <= 2048:
        return LoraLinearConfig(block_m, 32, 128, precision, 4, 4)
    return LoraLinearConfig(block_m, 128 if block_m == 64 else 64, 64, precision, 4, 4)


def lora_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shrunk: torch.Tensor, table: LoraTable,
    config: LoraLinearConfig, *, silu: bool = False,
    following: LoraTable | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``lora_expand(linear(x, weight, bias), ...)`` as one Triton launch: ``[T, N]``, or with silu ``[T, N / 2]``.

    Beside it, with `following`, `lora_shrink` of that for this table. The table's members make up the whole product.
    """
    require_triton()
    (num_rows, width), num_outputs = x.shape, len(weight) // (2 if silu else 1)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    sizes = [size for _, size in table.columns]
    tiles = triton.cdiv(sizes[0], config.block_n) if silu else sum(triton.cdiv(n, config.block_n) for n in sizes)
    sums = None
    if following is not None:
        sums = torch.empty(tiles, num_rows, 1, 1, following.rank, dtype=torch.float32, device=x.device)
    if not num_rows:
        return out, sums
    then = following or table
    firsts, lengths = zip(*(*table.columns, (0, 0), (0, 0)), strict=True)
    prefetch = prefetch_options(weight, config.block_n <= 32 * config.num_warps)
    with on_device_of(x):
        _lora_linear_kernel[(triton.cdiv(num_rows, config.block_m), tiles)](
            x, weight, bias, shrunk, table.places, table.scales, out, then.places, then.scales, sums,
            num_rows, width, *firsts[:3], *lengths[:3], x.stride(0), weight.stride(0), out.stride(0),
            RANK_DIVISOR=table.rank_divisor,
            BLOCK_R=table.rank_tile,
            HAS_BIAS=bias is not None,
            ADDS_BIAS=table.has_bias,
            SPLITS=len(shrunk),
            SILU=silu,
            NEXT_RANK=0 if following is None else following.rank,
            NEXT_ALIGNED=then.aligned,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN_N=all(size % config.block_n == 0 for size in sizes),
            EVEN_K=width % config.block_k == 0,
            INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **(table_options(table, x, config.precision) | prefetch),
        )
    return out, sums
