# mypy: disallow-untyped-defs=False
"""State spaces of Mamba-2 over packed prompts, whose states go on in their slots, in one launch.

In chunks of 64 tokens, by the dual form of "Transformers are SSMs" (Dao and Gu 2024, arXiv 2405.21060, section 6), as
in mamba_ssm and transformers: within a chunk a product of matrices, masked by decays, and from chunk to chunk the
states, which stay in registers. What is float32 beside 16 bits is cut into two bfloat16, as float16 is then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.device.cuda import shared_memory
from hf_paged.kernels._triton import after_previous_kernel, jit, on_device_of, pdl_options, require_triton, tl, triton
from hf_paged.kernels.recurrent._convolution import exp, softplus
from hf_paged.kernels.recurrent._products import cut, dot, dot_both_wide, dot_wide
from hf_paged.kernels.recurrent.packed_convolution import PackedRows, rows_on_host

CHUNK = 64


class Steps(NamedTuple):
    """What decides how states decay and what they take up, of T tokens and H heads.

    Attributes:
        dt: ``[T, H]``, the dtype of inputs, the last dim contiguous.
        a_log, d, dt_bias: ``[H]``, contiguous.
        low, high: between which steps are, as numbers of that dtype; `limits_in`.
    """

    dt: torch.Tensor
    a_log: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    low: float
    high: float


@lru_cache
def limits_in(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """Return limits of steps as `torch.clamp` rounds them beside tensors of a dtype."""
    lowest, highest = torch.tensor([low, high], dtype=dtype, device="cpu").tolist()
    return lowest, highest


def fits(size: int, device: torch.device) -> bool:
    """Return whether a device has the shared memory for states of this size, by what Triton took for Hopper GPUs."""
    return (24 << 10) + 512 * size <= shared_memory(device)


def packed_mamba2(mixed: torch.Tensor, steps: Steps, states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Compute the state spaces of T packed tokens, and leave the states behind each row's last token in its slot.

    Args:
        mixed: ``[T, C]``, contiguous: channels of H heads of P, then of B and of C, N of each of G groups.
        steps: of these tokens.
        states: ``[S, H, P, N]`` float32, of all slots; P and N are powers of two, see `mamba2.takes_sizes`.
        rows: of the T tokens.

    Returns:
        ``[T, H, P]`` float32, contiguous; undefined for tokens of no row. Steps are rounded to their dtype, as in
        transformers' `mamba2_chunk_scan`; all else is float32, but for inputs in bfloat16, where products have factors
        of 16 bits or more.
    """
    run = packed_mamba2_triton if mixed.is_cuda else packed_mamba2_reference
    return run(mixed, steps, states, rows)


def packed_mamba2_reference(mixed: torch.Tensor, steps: Steps, states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """:func:`packed_mamba2` in plain torch; in the dtype of states, which may be float64."""
    (heads, dim, size), wide = states.shape[1:], states.dtype
    out = states.new_zeros(len(mixed), heads, dim)
    share = F.softplus(steps.dt + steps.dt_bias.to(steps.dt.dtype)).clamp(steps.low, steps.high).to(wide)
    rate = -steps.a_log.to(wide).exp() * share
    for tokens, slot, has_state in rows_on_host(rows):
        x, b, c = mixed[tokens].to(wide).split([heads * dim, *[(mixed.shape[1] - heads * dim) // 2] * 2], 1)
        x = x.unflatten(1, (heads, dim)).transpose(0, 1)
        b, c = (part.unflatten(1, (-1, size)).transpose(0, 1) for part in (b, c))
        b, c = (part.repeat_interleave(heads // len(part), 0) for part in (b, c))
        state = states[slot] if has_state else torch.zeros_like(states[slot])
        made = []
        for x_, b_, c_, taken, r in zip(*(part.split(CHUNK, 1) for part in (
                x, b, c, share[tokens].T[:, :, None], rate[tokens].T[:, :, None])), strict=True):
            grown = r.double().cumsum(1)  # whose differences are wanted
            pairs = (grown - grown.mT).to(wide).tril().exp().tril()
            last = grown[:, -1:]
            made.append(((c_ @ b_.mT) * pairs) @ (taken * x_) + grown.to(wide).exp() * (c_ @ state.mT)
                        + steps.d.to(wide)[:, None, None] * x_)
            state = last.to(wide).exp() * state + (taken * (last - grown).to(wide).exp() * x_).mT @ b_
        states[slot] = state
        out[tokens] = torch.cat(made, 1).transpose(0, 1)
    return out


@jit()
def _add(a, a_rest, b, b_rest):
    """The sum of two numbers that are two float32 each."""
    made = a + b
    back = made - a
    return made, (a - (made - back)) + (b - back) + (a_rest + b_rest)


@jit()
def _product(a, b, INTERPRETED: tl.constexpr):
    """The product of a matrix in the inputs' dtype and one in float32, in this order or the other one."""
    if a.dtype == tl.bfloat16:
        made = dot_wide(a, b, INTERPRETED)
    elif b.dtype == tl.bfloat16:
        high, low = cut(a)
        made = dot(high, b, INTERPRETED) + dot(low, b, INTERPRETED)
    else:
        CUTS: tl.constexpr = a.dtype == tl.float16 or b.dtype == tl.float16
        made = dot_both_wide(a.to(tl.float32), b.to(tl.float32), CUTS, INTERPRETED)
    return made


@jit(varying_ints=("dt_token",), varying_pointers=("starts", "lengths", "slots"))
def _scan_kernel(
    mixed, dt, a_log, d, dt_bias, low, high, states, out, starts, lengths, slots, dt_token, state_slot,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by head and BLOCK of its P channels, and by row, whose chunks come one after another."""
    after_previous_kernel(PDL)
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * SIZE
    dtype = mixed.dtype.element_ty
    head, column = tl.program_id(0) // (P // BLOCK), tl.program_id(0) % (P // BLOCK) * BLOCK
    row = tl.program_id(1)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        i, n, p = tl.arange(0, CHUNK), tl.arange(0, SIZE), tl.arange(0, BLOCK)
        states += tl.load(slots + row).to(tl.int64) * state_slot + (head * P + column) * SIZE
        own = states + p[None, :] * SIZE + n[:, None]
        known = tl.where(tl.load(lengths + row) > end - begin, SIZE, 0)
        state = tl.load(own, mask=(n < known)[:, None], other=0.0)
        bias = tl.load(dt_bias + head).to(dtype).to(tl.float32)
        rate = -exp(tl.load(a_log + head).to(tl.float32), INTERPRETED)
        skip = tl.load(d + head).to(tl.float32)
        group = HEADS * P + head // (HEADS // GROUPS) * SIZE
        for start in range(begin, end, CHUNK):
            real = start + i < end
            at = (start + i).to(tl.int64)
            line = mixed + at[:, None] * CHANNELS
            x = tl.load(line + (head * P + column) + p[None, :], mask=real[:, None], other=0.0)
            b_at = line + group + n[None, :]
            b = tl.load(b_at, mask=real[:, None], other=0.0)
            c = tl.load(b_at + GROUPS * SIZE, mask=real[:, None], other=0.0)
            share = tl.load(dt + at * dt_token + head, mask=real, other=0.0).to(tl.float32)
            share = softplus((share + bias).to(dtype).to(tl.float32), INTERPRETED).to(dtype).to(tl.float32)
            share = tl.where(share < low, low, tl.where(share > high, high, share))
            share = tl.where(real, share, 0.0)
            grown, rest = tl.associative_scan((share * rate, tl.zeros([CHUNK], tl.float32)), 0, _add)
            last = tl.sum(tl.where(i == CHUNK - 1, grown, 0.0), 0)
            last_rest = tl.sum(tl.where(i == CHUNK - 1, rest, 0.0), 0)
            wide = x.to(tl.float32)
            made = exp(grown, INTERPRETED)[:, None] * _product(c, state, INTERPRETED) + skip * wide
            seen = i[:, None] >= i[None, :]
            pairs = (grown[:, None] - grown[None, :]) + (rest[:, None] - rest[None, :])
            pairs = tl.exp(tl.where(seen, pairs, 0.0)) * share[None, :]
            scores = tl.where(seen, dot(c, tl.trans(b), INTERPRETED) * pairs, 0.0)
            made += _product(scores, x, INTERPRETED)
            tl.store(out + ((at * HEADS + head) * P + column)[:, None] + p[None, :], made, mask=real[:, None])
            kept = wide * (share * exp((last - grown) + (last_rest - rest), INTERPRETED))[:, None]
            state = state * exp(last, INTERPRETED) + _product(tl.trans(b), kept, INTERPRETED)
        tl.store(own, state)


def packed_mamba2_triton(mixed: torch.Tensor, steps: Steps, states: torch.Tensor, rows: PackedRows, *,
                         block: int = 32) -> torch.Tensor:
    """:func:`packed_mamba2` as one Triton launch; ``block``: channels of a head in a program.

    Of 16, 32 and 64 channels, 32 are fastest on an H100 for a prompt of 8,192 tokens of 80 heads of 64 x 128 in
    bfloat16: 679 us. 64 prompts of 512 tokens take 1807 us, with 64 channels 1441.
    """
    require_triton()
    tokens, (heads, dim, size) = len(mixed), states.shape[1:]
    out = torch.empty(tokens, heads, dim, dtype=torch.float32, device=mixed.device)
    if not tokens:
        return out
    chunk, num_stages = (16, 1) if mixed.dtype == torch.float32 else (CHUNK, 2)  # with larger ones registers spill
    block = min(block, dim)
    with on_device_of(out):
        _scan_kernel[(heads * (dim // block), len(rows.slots))](
            mixed, *steps, states, out, *rows, steps.dt.stride(0), states.stride(0), HEADS=heads,
            GROUPS=(mixed.shape[1] - heads * dim) // (2 * size), P=dim, SIZE=size, CHUNK=chunk, BLOCK=block,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=4, num_stages=num_stages,
            enable_fp_fusion=False,  # of which `_add` knows nothing
            **pdl_options(out),
        )
    return out
