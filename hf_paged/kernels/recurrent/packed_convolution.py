# mypy: disallow-untyped-defs=False
"""Convolutions of the channels of packed prompts, behind the last inputs of their sequences, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    on_device_of,
    pdl_options,
    require_triton,
    row_of_tile,
    tl,
    triton,
)
from hf_paged.kernels.recurrent._convolution import silu

_TOKENS = 32  # of a tile


class PackedRows(NamedTuple):
    """R rows of a step, whose T new tokens lie one row behind the other.

    Attributes:
        starts: ``[R + 1]`` int32, the first token of each row, and the end of the last one.
        lengths: ``[R]`` int32, all tokens of each sequence. A row whose tokens are all new begins without a state.
        slots: ``[R]`` int32, no two alike but for rows without new tokens, which change nothing.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor


def rows_on_host(rows: PackedRows) -> list[tuple[slice, int, bool]]:
    """Return tokens, slot, and whether earlier tokens have made a state, of each row with new tokens."""
    starts, lengths, slots = (tensor.tolist() for tensor in rows)
    return [(slice(first, end), slot, length > end - first)
            for first, end, length, slot in zip(starts, starts[1:], lengths, slots, strict=False) if end > first]


def packed_convolution(parts: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None,
                       states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Compute silu of the causal convolution of each channel, and leave each row's last inputs in its slot.

    Args:
        parts: three tensors ``[T, runs, width]`` that have the C channels, one behind the other; widths are multiples
            of 16, the last dims contiguous.
        weight: ``[C, 1, taps]``, of 2, 4 or 8 taps.
        bias: ``[C]``, or None.
        states: ``[S, C, taps]``, the parts' dtype: the last inputs of all slots.
        rows: of the T tokens.

    Returns:
        ``[T, C]``, contiguous; undefined for tokens of no row. Rounded to the parts' dtype before silu and behind it.
    """
    run = packed_convolution_triton if weight.is_cuda else packed_convolution_reference
    return run(parts, weight, bias, states, rows)


def packed_convolution_reference(parts: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None,
                                 states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """:func:`packed_convolution` in plain torch."""
    mixed = torch.cat([part.flatten(1) for part in parts], 1)
    out, taps = torch.zeros_like(mixed), weight.shape[-1]
    for tokens, slot, has_state in rows_on_host(rows):
        before = states[slot] if has_state else torch.zeros_like(states[slot])
        inputs = torch.cat([before, mixed[tokens].T], 1)
        out[tokens] = F.silu(F.conv1d(inputs[None, :, 1:], weight, bias, groups=len(weight)))[0].T
        states[slot] = inputs[:, -taps:]
    return out


@jit(varying_ints=("num_rows",), varying_pointers=("starts", "lengths", "slots"))
def _packed_convolution_kernel(
    first, second, third, weight, bias, states, out, starts, lengths, slots, num_rows, first_token, first_run,
    second_token, second_run, third_token, third_run, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    FIRST_WIDTH: tl.constexpr, SECOND_WIDTH: tl.constexpr, THIRD_WIDTH: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by block of channels, and by tile of tokens of a row. A row's first tile alone has to do with its
    slot: it reads it, and then writes the last inputs of the row, wherever they are."""
    after_previous_kernel(PDL)
    channel, tile = tl.program_id(0) * BLOCK, tl.program_id(1)
    CHANNELS: tl.constexpr = FIRST + SECOND + THIRD
    dtype = out.dtype.element_ty
    row = row_of_tile(starts, tile, num_rows, TOKENS)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    start = begin + (tile - (begin // TOKENS + row)) * TOKENS
    if start < end:
        if channel < FIRST:
            x = first + (channel // FIRST_WIDTH) * first_run + channel % FIRST_WIDTH
            stride = first_token.to(tl.int64)
        elif channel < FIRST + SECOND:
            x = second + ((channel - FIRST) // SECOND_WIDTH) * second_run + (channel - FIRST) % SECOND_WIDTH
            stride = second_token.to(tl.int64)
        else:
            within = channel - FIRST - SECOND
            x = third + (within // THIRD_WIDTH) * third_run + within % THIRD_WIDTH
            stride = third_token.to(tl.int64)
        lane = tl.arange(0, BLOCK)
        token = start + tl.arange(0, TOKENS)
        slot = tl.load(slots + row).to(tl.int64)
        own = states + (slot * CHANNELS + channel + lane) * TAPS
        oldest = tl.where(tl.load(lengths + row) > end - begin, begin - TAPS, begin)
        mixed = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            at = token + (tap - TAPS + 1)
            inputs = tl.load(x + at[:, None] * stride + lane[None, :], mask=((at >= begin) & (at < end))[:, None],
                             other=0.0)
            is_known = (at < begin) & (at >= oldest)
            earlier = tl.load(own[None, :] + (TAPS + at - begin)[:, None], mask=is_known[:, None], other=0.0)
            taps = tl.load(weight + (channel + lane) * TAPS + tap).to(tl.float32)
            mixed += tl.where((at < begin)[:, None], earlier, inputs).to(tl.float32) * taps[None, :]
        if HAS_BIAS:
            mixed += tl.load(bias + channel + lane).to(tl.float32)[None, :]
        mixed = silu(mixed.to(dtype).to(tl.float32), INTERPRETED).to(dtype)
        line = out + token[:, None].to(tl.int64) * CHANNELS + channel + lane[None, :]
        tl.store(line, mixed, mask=(token < end)[:, None])
        if start == begin:
            place = tl.arange(0, TAPS)[None, :]
            kept = end - TAPS + place
            new = tl.load(x + kept * stride + lane[:, None], mask=kept >= begin, other=0.0)
            old = tl.load(own[:, None] + (TAPS + kept - begin), mask=(kept < begin) & (kept >= oldest), other=0.0)
            tl.debug_barrier()
            tl.store(own[:, None] + place, tl.where(kept < begin, old, new))


def packed_convolution_triton(parts: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None,
                              states: torch.Tensor, rows: PackedRows, *, tokens: int = _TOKENS,
                              num_warps: int = 4) -> torch.Tensor:
    """:func:`packed_convolution` as one Triton launch; ``tokens``: of a tile."""
    require_triton()
    widths, counts = [part.shape[2] for part in parts], [part.shape[1] * part.shape[2] for part in parts]
    total, channels = len(parts[0]), sum(counts)
    out = torch.empty(total, channels, dtype=weight.dtype, device=weight.device)
    if not total:
        return out
    block = min(64, *(width & -width for width in widths))
    # The stride of a single token may be a smaller number.
    strides = (stride for part, width in zip(parts, widths, strict=True)
               for stride in (max(part.stride(0), width), part.stride(1)))
    with on_device_of(out):
        _packed_convolution_kernel[(channels // block, total // tokens + len(rows.slots))](
            *parts, weight, weight if bias is None else bias, states, out, *rows, len(rows.slots), *strides,
            FIRST=counts[0], SECOND=counts[1], THIRD=counts[2], FIRST_WIDTH=widths[0], SECOND_WIDTH=widths[1],
            THIRD_WIDTH=widths[2], TAPS=weight.shape[-1], TOKENS=tokens, BLOCK=block, HAS_BIAS=bias is not None,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=num_warps, enable_fp_fusion=False,
            **pdl_options(out),
        )
    return out
