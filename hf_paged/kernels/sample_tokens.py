# mypy: disallow-untyped-defs=False
"""Greedy or Gumbel-max token of every row in one pass over the logits, and the random numbers it takes."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton

MASK32 = 0xFFFFFFFF
_TILE = 1024
# Programs that fill a large GPU once; a row is cut into no more parts than that takes.
_PROGRAMS = 2048
_MAX_SPLITS = 256


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """One token per row: the arg-max at temperature 0, else a draw from softmax(logits / temperature).

    Args:
        logits: ``[R, V]``, read as float32; rows may be strided, the last dim is contiguous.
        temperature: ``[R]`` float32, not negative.
        seed, position: ``[R]`` int64, what the row's random numbers come from; position in ``0 .. 2**32 - 1``.

    Returns:
        ``[R]`` int64; greedy ties go to the lowest index. -1 where stock's ``argmax`` or ``multinomial`` would trip:
        NaN anywhere in the row; when sampling, also +inf or nothing above -inf.

    Raises:
        ValueError: shapes, dtypes or strides that are not as above.
    """
    _check(logits, temperature, seed, position)
    run = sample_tokens_triton if logits.is_cuda else sample_tokens_reference
    return run(logits, temperature, seed, position)


def sample_tokens_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """:func:`sample_tokens` in plain torch."""
    scores = logits.float()
    top = scores.amax(dim=-1)
    drawn = temperature != 0.0
    # Gumbel-max (Gumbel 1954; Maddison et al. 2014): argmax(log p + g) draws from p, with g = -log(Exponential(1)).
    noise = exponential_noise(seed, position, logits.shape[-1])
    sampled = (scores / temperature[:, None] - noise.log_()).argmax(dim=-1)
    tokens = torch.where(drawn, sampled, scores.argmax(dim=-1))
    return tokens.masked_fill_(top.isnan() | (drawn & top.isinf()), -1)


def exponential_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential(1) variates float32 [R, vocab_size], a function of (seed, position, token) alone.

    32 hashed bits u in (0, 1) give -log1p(-u): small values, which decide the arg-max, keep full precision. u is kept
    below 1 in float32, since an infinite variate would bar its token even where it is the only one left.
    """
    low, high = seed & MASK32, (seed >> 32) & MASK32
    key0 = _mix(low ^ _mix(high ^ _mix(position ^ 0x9E3779B9)))[:, None]
    key1 = _mix(high ^ _mix(low ^ _mix(position ^ 0x85EBCA6B)))[:, None]
    token = torch.arange(vocab_size, device=seed.device, dtype=torch.int64)[None, :]
    bits = _mix(_mix(token ^ key0) ^ key1)
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-uniform)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector), on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@jit()
def _mix32(x):
    """:func:`_mix` in uint32 arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def _row_keys(seed, position):
    """The two uint32 keys of a row in :func:`exponential_noise`."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    key0 = _mix32(low ^ _mix32(high ^ _mix32(place ^ 0x9E3779B9)))
    key1 = _mix32(high ^ _mix32(low ^ _mix32(place ^ 0x85EBCA6B)))
    return key0, key1


@jit()
def _token_bits(token, key0, key1):
    return _mix32(_mix32(token.to(tl.uint32) ^ key0) ^ key1)


@jit()
def _exponential(bits, INTERPRETED: tl.constexpr):
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    if INTERPRETED:  # no log1p there; 1 - uniform is exact in float64
        noise = -tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32)
    else:
        noise = -tl.extra.cuda.libdevice.log1p(-uniform)
    return noise


@jit(varying_pointers=("temperature", "seed", "position"))
def _best_of_split_kernel(
    logits,
    temperature,
    seed,
    position,
    best_score,
    best_token,
    row_stride,
    vocab_size,
    split_size,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Highest score of a part of a row and its first token: 2**31 - 1 for no candidate, -1 for an invalid row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heat = tl.load(temperature + row)
    drawn = heat != 0.0
    key0, key1 = _row_keys(tl.load(seed + row), tl.load(position + row))
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    bad = tl.zeros([TILE], tl.int32)
    begin = split * split_size
    for start in range(begin, tl.minimum(begin + split_size, vocab_size), TILE):
        token = start + lane
        inside = token < vocab_size
        score = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        wrong = score != score
        candidate = inside
        if drawn:
            wrong |= score == float("inf")
            candidate = inside & (score > float("-inf"))
            score = tl.div_rn(score, heat) - tl.log(_exponential(_token_bits(token, key0, key1), INTERPRETED))
        bad |= wrong.to(tl.int32)
        taken = candidate & ((score > best) | (where == 0x7FFFFFFF))
        best = tl.where(taken, score, best)
        where = tl.where(taken, token, where)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0)
    part = row * tl.num_programs(1) + split
    tl.store(best_score + part, top)
    tl.store(best_token + part, tl.where(tl.max(bad, 0) > 0, -1, first))


@jit(varying_ints=("num_splits",))
def _best_of_row_kernel(best_score, best_token, out, num_splits, MAX_SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    inside = split < num_splits
    score = tl.load(best_score + row * num_splits + split, mask=inside, other=float("-inf"))
    token = tl.load(best_token + row * num_splits + split, mask=inside, other=0x7FFFFFFF)
    first = tl.min(tl.where(score == tl.max(score, 0), token, 0x7FFFFFFF), 0)
    invalid = (tl.min(token, 0) < 0) | (first == 0x7FFFFFFF)
    tl.store(out + row, tl.where(invalid, -1, first).to(tl.int64))


def split_vocabulary(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """(number of parts of a row, tokens of a part): parts of whole tiles, as many as fill the device."""
    tiles = -(-vocab_size // _TILE)
    wanted = max(1, min(tiles, _PROGRAMS // max(1, num_rows), _MAX_SPLITS))
    tiles_each = -(-tiles // wanted)
    return -(-tiles // tiles_each), tiles_each * _TILE


def sample_tokens_triton(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """:func:`sample_tokens` as two Triton launches: the best of each part of each row, then the best of those.

    The grid follows from shapes alone, and the temperature is read on the device: one CUDA graph serves every mix of
    greedy and sampled rows. A sampled token may differ from the reference's where two scores are within rounding.
    """
    require_triton()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_splits, split_size = split_vocabulary(num_rows, vocab_size)
    best_score = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        _best_of_split_kernel[(num_rows, num_splits)](
            logits,
            temperature,
            seed,
            position,
            best_score,
            best_token,
            logits.stride(0),
            vocab_size,
            split_size,
            TILE=_TILE,
            INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=4,
            enable_fp_fusion=False,
        )
        _best_of_row_kernel[(num_rows,)](best_score, best_token, out, num_splits, MAX_SPLITS=_MAX_SPLITS, num_warps=1)
    return out


def _check(logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be a float tensor [R, V], V > 0, got {tuple(logits.shape)} {logits.dtype}")
    if logits.stride(1) != 1:
        raise ValueError(f"the last dim of logits must be contiguous: strides {logits.stride()}")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
    ):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be [{logits.shape[0]}] {dtype}, contiguous, got {tuple(tensor.shape)} {tensor.dtype}"
            )
