# mypy: disallow-untyped-defs=False
"""Attention of packed tokens that see all of their window, and nothing else: towers of images, in one launch.

Softmax is online and in base 2, as in `_tile.py`. A head is two parts in lanes, of which the first is a power of two:
one of 80 takes 64 + 16 lanes in place of 128.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import shared_memory, upload
from hf_paged.kernels._checks import Expected, check_tensors
from hf_paged.kernels._triton import jit, next_power_of_2, on_device_of, require_triton, tl
from hf_paged.kernels.attention._tile import LOG2_E
from hf_paged.kernels.attention.prefill import DEEP_SHARED_MEMORY

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_DIM = 256
_SHORT = 64  # tokens of the longest window for which tiles are small
_FIELDS = 3  # of a tile: its first query, first and end of its window


class WindowedConfig(NamedTuple):
    """Tile shape and launch options: ``block_m`` queries, ``block_n`` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that two programs fit a multiprocessor


_SHALLOW, _SHORT_TILES = WindowedConfig(128, 64, 8, 2), WindowedConfig(64, 64, 4, 2)
_WIDE = WindowedConfig(64, 32, 8, 2)
# An exact fp32 product runs on the plain cores out of registers. By the largest head size.
_FLOAT = {64: WindowedConfig(64, 32, 8, 2), 128: WindowedConfig(32, 32, 8, 2), MOST_DIM: WindowedConfig(32, 16, 8, 2)}


class Windows:
    """Windows of packed tokens: the tokens ``starts[i] .. starts[i + 1] - 1`` see each other.

    Args:
        starts: host, [R + 1], from 0 to the number of tokens.

    Raises:
        ValueError: starts that do not ascend from 0.
    """

    def __init__(self, starts: np.ndarray) -> None:
        lengths = np.diff(starts)
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (lengths < 0).any():
            raise ValueError(f"starts={starts!r:.200}: expected [R + 1] numbers that ascend from 0")
        self.starts, self.count, self.num_tokens = starts, len(lengths), int(starts[-1])
        self.longest = int(lengths.max())
        self._tiles: dict[tuple[int, torch.device], torch.Tensor] = {}

    def tiles(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the tiles of up to ``size`` queries, [tiles, 3] int32: first query, first and end of the window."""
        found = self._tiles.get((size, device))
        if found is None:
            counts = -(-np.diff(self.starts) // size)
            window = np.repeat(np.arange(len(counts)), counts)
            place = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
            first, end = self.starts[window], self.starts[window + 1]
            table = np.stack([first + place * size, first, end], 1).astype(np.int32)
            found = self._tiles[size, device] = upload(table, device)
        return found


def windowed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: Windows,
                       scale: float) -> torch.Tensor:
    """Attend from each token to all tokens of its window.

    Args:
        q: ``[T, Hq, D]`` float32, float16 or bfloat16, the last dim contiguous; D up to 256.
        k, v: ``[T, Hkv, D]``, q's dtype, likewise.
        windows: of T tokens.
        scale: of scores, above 0.

    Returns:
        ``[T, Hq, D]``, q's dtype, contiguous. Sums are float32; weights are rounded to q's dtype before their product
        with v, as in `scaled_dot_product_attention`.

    Raises:
        ValueError: tensors of other shapes, or another number of tokens than the windows have.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    kv_shape = tokens, kv_heads, dim
    check_tensors(Expected("q", q, (windows.num_tokens, heads, dim), None), Expected("k", k, kv_shape, q.dtype),
                  Expected("v", v, kv_shape, q.dtype))
    if q.dtype not in DTYPES or dim > MOST_DIM or heads % kv_heads or not scale > 0:
        raise ValueError(f"q of {heads} heads of {dim}, {q.dtype}, {kv_heads} heads of k, scale={scale}: expected one "
                         f"of {DTYPES}, up to {MOST_DIM}, a multiple of k's heads, and a scale above 0")
    return (windowed_attention_triton if q.is_cuda else windowed_attention_reference)(q, k, v, windows, scale)


def windowed_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: Windows,
                                 scale: float) -> torch.Tensor:
    """:func:`windowed_attention` in plain torch, by `scaled_dot_product_attention` window by window."""
    group, out = q.shape[1] // k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    for first, end in zip(windows.starts[:-1].tolist(), windows.starts[1:].tolist(), strict=True):
        own = q[first:end].transpose(0, 1)[None]
        keys, values = (x[first:end].transpose(0, 1).repeat_interleave(group, 0)[None] for x in (k, v))
        out[first:end] = torch.nn.functional.scaled_dot_product_attention(own, keys, values, scale=scale)[0].transpose(
            0, 1)
    return out


@lru_cache(maxsize=64)
def _lanes(dim: int) -> tuple[int, int]:
    """Return the lanes of both parts of a head: powers of two that tl.dot takes, the second maybe 0."""
    main = max(16, next_power_of_2(dim + 1) // 2)
    if main >= dim:
        return main, 0
    rest = max(16, next_power_of_2(dim - main))
    return (main, rest) if rest < main else (2 * main, 0)


def windowed_config(dim: int, itemsize: int, longest: int, shared_memory: int) -> WindowedConfig:
    """Return the tiles for a head size and the longest window; ``shared_memory``: bytes a block may have.

    Keys come in tiles of one size, whatever the windows: a window's result does not depend on the others.
    """
    if itemsize == 4:
        return next(config for most, config in _FLOAT.items() if dim <= most)
    if dim > 128:
        return _WIDE
    if longest <= _SHORT:
        return _SHORT_TILES
    return _SHALLOW._replace(num_stages=3) if shared_memory >= DEEP_SHARED_MEMORY else _SHALLOW


@jit()
def _loaded(tile, lane, inside, DIM: tl.constexpr, IS_WIDER: tl.constexpr, MASKED: tl.constexpr):
    """Load some lanes of a tile of tokens; IS_WIDER: not all of them belong to a head, MASKED: see `_add_keys`."""
    if MASKED:
        return tl.load(tile + lane[None, :], mask=inside & (lane < DIM)[None, :], other=0.0)
    elif IS_WIDER:  # noqa: RET505  (decided at compile time)
        at = tile + lane[None, :]
        return tl.load(at, mask=tl.broadcast_to((lane < DIM)[None, :], at.shape), other=0.0)
    else:
        return tl.load(tile + lane[None, :])


@jit()
def _add_keys(acc, acc_rest, top, total, q_main, q_rest, k, v, k_token, v_token, left, scale_log2,
              BLOCK_N: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr):
    """Return (acc, acc_rest, top, total) after a tile of keys; where MASKED, only ``left`` of it belong to the window.
    """
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, MAIN)
    k_tile = k + n[:, None] * k_token
    v_tile = v + n[:, None] * v_token
    inside = (n < left)[:, None]
    keys = _loaded(k_tile, lane, inside, DIM, MAIN > DIM, MASKED)
    values = _loaded(v_tile, lane, inside, DIM, MAIN > DIM, MASKED)
    score = tl.dot(q_main, tl.trans(keys), input_precision="ieee")
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        keys_rest = _loaded(k_tile, rest, inside, DIM, MAIN + REST > DIM, MASKED)
        values_rest = _loaded(v_tile, rest, inside, DIM, MAIN + REST > DIM, MASKED)
        score = tl.dot(q_rest, tl.trans(keys_rest), score, input_precision="ieee")
    if MASKED:
        score = tl.where((n < left)[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    total = total * rescale + tl.sum(weight, 1)
    weight = weight.to(values.dtype)
    acc = tl.dot(weight, values, acc * rescale[:, None], input_precision="ieee")
    if REST > 0:
        acc_rest = tl.dot(weight, values_rest, acc_rest * rescale[:, None], input_precision="ieee")
    return acc, acc_rest, new_top, total


_STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "heads", "group")


@jit(varying_ints=_STRIDES)
def _windowed_kernel(
    q, k, v, out, tiles, q_token, q_head, k_token, k_head, v_token, v_head, heads, group, scale_log2,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FIELDS: tl.constexpr,
):
    """Programs: by tile of `Windows.tiles`, and by head. Strides are counted in VECTOR elements."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    q_token, q_head, k_token = q_token * VECTOR, q_head * VECTOR, k_token * VECTOR
    k_head, v_token, v_head = k_head * VECTOR, v_token * VECTOR, v_head * VECTOR
    first = tl.load(tiles + tile * FIELDS)
    begin = tl.load(tiles + tile * FIELDS + 1)
    end = tl.load(tiles + tile * FIELDS + 2)
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, MAIN)
    is_query = (m < end - first)[:, None]
    q_tile = q + first.to(tl.int64) * q_token + head.to(tl.int64) * q_head + m[:, None] * q_token
    q_main = tl.load(q_tile + lane[None, :], mask=is_query & (lane < DIM)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_tile + rest[None, :], mask=is_query & (rest < DIM)[None, :], other=0.0)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    else:
        q_rest = m  # of no use
        acc_rest = tl.zeros([BLOCK_M], tl.float32)
    # Finite and below every score: with -inf a row that has seen nothing yet would compute -inf - -inf.
    top = tl.full([BLOCK_M], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # int64: a call may have more than 2**31 elements.
    k += begin.to(tl.int64) * k_token + (head // group).to(tl.int64) * k_head
    v += begin.to(tl.int64) * v_token + (head // group).to(tl.int64) * v_head
    left = end - begin
    for _ in range(left // BLOCK_N):
        acc, acc_rest, top, total = _add_keys(acc, acc_rest, top, total, q_main, q_rest, k, v, k_token, v_token, left,
                                              scale_log2, BLOCK_N, DIM, MAIN, REST, False)
        k += BLOCK_N * k_token
        v += BLOCK_N * v_token
    left = left % BLOCK_N
    if left > 0:
        acc, acc_rest, top, total = _add_keys(acc, acc_rest, top, total, q_main, q_rest, k, v, k_token, v_token, left,
                                              scale_log2, BLOCK_N, DIM, MAIN, REST, True)
    out_tile = out + (first.to(tl.int64) * heads + head) * DIM + m[:, None] * (heads * DIM)
    dtype = out.dtype.element_ty
    tl.store(out_tile + lane[None, :], (acc / total[:, None]).to(dtype), mask=is_query & (lane < DIM)[None, :])
    if REST > 0:
        tl.store(out_tile + rest[None, :], (acc_rest / total[:, None]).to(dtype),
                 mask=is_query & (rest < DIM)[None, :])


def windowed_attention_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: Windows, scale: float, *,
                              config: WindowedConfig | None = None) -> torch.Tensor:
    """:func:`windowed_attention` as one Triton launch; ``config``: None for the measured one."""
    require_triton()
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    vector = _vector(dim, q.element_size())
    q, k, v = (_aligned(x, vector) for x in (q, k, v))
    if config is None:
        config = windowed_config(dim, q.element_size(), windows.longest, shared_memory(q.device))
    main, rest = _lanes(dim)
    strides = [stride // vector for x in (q, k, v) for stride in x.stride()[:2]]
    tiles = windows.tiles(config.block_m, q.device)
    with on_device_of(q):
        _windowed_kernel[(len(tiles), heads)](
            q, k, v, out, tiles, *strides, heads, heads // k.shape[1], scale * LOG2_E, DIM=dim, MAIN=main, REST=rest,
            VECTOR=vector, BLOCK_M=config.block_m, BLOCK_N=config.block_n, FIELDS=_FIELDS,
            num_warps=config.num_warps, num_stages=config.num_stages,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}))
    return out


def _vector(dim: int, itemsize: int) -> int:
    """Return how many elements are read at once: up to 16 bytes, as many as divide a head."""
    return int(np.gcd(dim, 16 // itemsize))


def _aligned(x: torch.Tensor, vector: int) -> torch.Tensor:
    """Return a tensor whose first element lies at a multiple of 16 bytes, as do others ``vector`` elements apart if
    those are 16 bytes."""
    is_aligned = x.data_ptr() % 16 == 0 and not any(stride % vector for stride in x.stride()[:2])
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def launches(dim: int, dtype: torch.dtype, device: torch.device) -> list[tuple[torch.Tensor, Windows]]:
    """Return q, which is k and v as well, and windows of launches that run all kernels of a head size."""
    return [(torch.zeros(length, 1, dim, dtype=dtype, device=device), Windows(np.array([0, length])))
            for length in (_SHORT, 2 * _SHORT)]
