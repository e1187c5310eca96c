# mypy: disallow-untyped-defs=False
"""The gated delta rule over packed prompts, whose states go on in their slots, in two launches.

In chunks of 64 tokens, by the form of "Parallelizing Linear Transformers with the Delta Rule" (Yang et al. 2024, arXiv
2406.06484, section 3) with the decays of "Gated Delta Networks" (arXiv 2412.06464), as in flash-linear-attention and
transformers. One launch inverts a triangular matrix for each chunk; the other goes through each row's chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.device.cuda import shared_memory
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
from hf_paged.kernels.recurrent._convolution import exp, softplus
from hf_paged.kernels.recurrent._products import dot, dot_both_wide, dot_wide
from hf_paged.kernels.recurrent.delta_net import L2_EPS
from hf_paged.kernels.recurrent.packed_convolution import PackedRows, rows_on_host

CHUNK = 64  # as in transformers


class DeltaGates(NamedTuple):
    """What decides how states decay and what they take up, of T tokens and H heads of keys with G heads of values each.

    Attributes:
        alpha, beta: ``[T, H, G]``, the dtype of keys, the last dim contiguous.
        a_log, dt_bias: ``[H * G]``, contiguous.
    """

    alpha: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


def scratch_bytes(key_heads: int, value_heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Return the bytes that a layer takes for each packed token, besides what its projections make."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return itemsize * (channels + 2 * value_heads * value_dim) + 4 * value_heads * (CHUNK + 3)


def fits(key_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has the shared memory for heads of this size, by what Triton took for Hopper GPUs."""
    return (36 << 10) + key_dim * (640 if dtype == torch.bfloat16 else 1024) <= shared_memory(device)


def packed_delta_rule(mixed: torch.Tensor, gates: DeltaGates, states: torch.Tensor,
                      rows: PackedRows) -> torch.Tensor:
    """Compute the rule for T packed tokens, and leave the states behind each row's last token in its slot.

    Args:
        mixed: ``[T, H * (2 * K + G * V)]``, contiguous: heads of queries, of keys, and of values.
        gates: of these tokens.
        states: ``[S, H * G, K, V]`` float32, of all slots; K and V are powers of two from 16 to 256.
        rows: of the T tokens.

    Returns:
        ``[T, H * G, V]``, the dtype of `mixed`, contiguous; undefined for tokens of no row. beta is rounded to this
        dtype; all else is float32, but for bfloat16, where products have factors of 16 bits or more.
    """
    run = packed_delta_rule_triton if mixed.is_cuda else packed_delta_rule_reference
    return run(mixed, gates, states, rows)


def packed_delta_rule_reference(mixed: torch.Tensor, gates: DeltaGates, states: torch.Tensor,
                                rows: PackedRows) -> torch.Tensor:
    """:func:`packed_delta_rule` in plain torch; in the dtype of states, which may be float64."""
    (_, heads, group), (_, value_heads, key_dim, value_dim) = gates.alpha.shape, states.shape
    out = mixed.new_zeros(len(mixed), value_heads, value_dim)
    wide = states.dtype
    for tokens, slot, has_state in rows_on_host(rows):
        query, key, value = mixed[tokens].to(wide).split([heads * key_dim, heads * key_dim, value_heads * value_dim], 1)
        query, key = (part.unflatten(1, (heads, key_dim)).repeat_interleave(group, 1).transpose(0, 1)
                      for part in (query, key))
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + L2_EPS) for part in (query, key))
        query, value = query / key_dim**0.5, value.unflatten(1, (value_heads, value_dim)).transpose(0, 1)
        share = gates.beta[tokens].flatten(1).sigmoid().to(wide).T[:, :, None]
        rate = -gates.a_log.to(wide).exp() * F.softplus(gates.alpha[tokens].flatten(1).to(wide) + gates.dt_bias)
        state = states[slot] if has_state else torch.zeros_like(states[slot])
        made = []
        for q, k, v, b, r in zip(*(part.split(CHUNK, 1) for part in (query, key, value, share, rate.T)), strict=True):
            grown = r.cumsum(1)[:, :, None]
            pairs = (grown - grown.mT).tril().exp().tril()
            system = (b * (k @ k.mT) * pairs).tril(-1) + torch.eye(k.shape[1], dtype=wide, device=k.device)
            new = torch.linalg.solve_triangular(system, b * (v - grown.exp() * (k @ state)), upper=False)
            made.append(grown.exp() * (q @ state) + ((q @ k.mT) * pairs) @ new)
            state = grown[:, -1:].exp() * state + (k * (grown[:, -1:] - grown).exp()).mT @ new
        states[slot] = state
        out[tokens] = torch.cat(made, 1).transpose(0, 1).to(out.dtype)
    return out


@jit()
def _inverse(lower, SIZE: tl.constexpr, CUTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The inverse of the unit matrix plus a strictly lower triangular one, [SIZE, SIZE] float32.

    Of the blocks on the diagonal, from single elements on: [[A, 0], [X, B]] has [[A', 0], [-B' X A', B']].
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    made = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    for level in tl.static_range(1, 9):
        if (1 << level) < SIZE:
            below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
            product = dot_both_wide(made, tl.where(below, lower, 0.0), CUTS, INTERPRETED)
            made -= dot_both_wide(product, made, CUTS, INTERPRETED)
    return made


@jit(varying_ints=("num_rows", "num_tokens"), varying_pointers=("starts",))
def _chunks_kernel(
    mixed, alpha, beta, a_log, dt_bias, factors, solved, starts, num_rows, num_tokens, alpha_token, alpha_head,
    beta_token, beta_head, HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, L2_EPS: tl.constexpr, ROOT: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by head of values, and by chunk of a row. What the states are not needed for: of each token the log of
    its decay since the chunk began, one over the length of its query and its key, and a line of the matrix that makes
    new values of what states lack."""
    after_previous_kernel(PDL)
    head, tile = tl.program_id(0), tl.program_id(1)
    VALUE_HEADS: tl.constexpr = HEADS * GROUP
    CHANNELS: tl.constexpr = HEADS * 2 * K + VALUE_HEADS * V
    CUTS: tl.constexpr = mixed.dtype.element_ty == tl.bfloat16
    row = row_of_tile(starts, tile, num_rows, CHUNK)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    start = begin + (tile - (begin // CHUNK + row)) * CHUNK
    if start < end:
        i, k = tl.arange(0, CHUNK), tl.arange(0, K)
        real = start + i < end
        at = (start + i).to(tl.int64)
        query_at = mixed + at[:, None] * CHANNELS + (head // GROUP) * K + k[None, :]
        query = tl.load(query_at, mask=real[:, None], other=0.0).to(tl.float32)
        key = tl.load(query_at + HEADS * K, mask=real[:, None], other=0.0)
        wide = key.to(tl.float32)
        query_scale = tl.rsqrt(tl.sum(query * query, 1) + L2_EPS) / ROOT
        key_scale = tl.rsqrt(tl.sum(wide * wide, 1) + L2_EPS)
        by_head, member = head // GROUP, head % GROUP
        share = tl.load(beta + at * beta_token + by_head * beta_head + member, mask=real, other=0.0)
        share = tl.div_rn(tl.zeros([CHUNK], tl.float32) + 1.0, 1.0 + exp(-share.to(tl.float32), INTERPRETED))
        share = share.to(mixed.dtype.element_ty).to(tl.float32)
        step = tl.load(alpha + at * alpha_token + by_head * alpha_head + member, mask=real, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(dt_bias + head).to(tl.float32), INTERPRETED)
        rate = -exp(tl.load(a_log + head).to(tl.float32), INTERPRETED)
        grown = tl.cumsum(tl.where(real, rate * step, 0.0), 0)
        place = factors + at * VALUE_HEADS + head
        plane = num_tokens.to(tl.int64) * VALUE_HEADS
        tl.store(place, grown, mask=real)
        tl.store(place + plane, query_scale, mask=real)
        tl.store(place + 2 * plane, key_scale, mask=real)
        below = (i[:, None] > i[None, :]) & real[:, None]
        decay = exp(tl.where(below, grown[:, None] - grown[None, :], 0.0), INTERPRETED)
        weights = dot(key, tl.trans(key), INTERPRETED) * (share * key_scale)[:, None] * key_scale[None, :] * decay
        made = _inverse(tl.where(below, weights, 0.0), CHUNK, CUTS, INTERPRETED) * share[None, :]
        tl.store(solved + (at * VALUE_HEADS + head)[:, None] * CHUNK + i[None, :], made, mask=real[:, None])


@jit(varying_ints=("num_tokens",), varying_pointers=("starts", "lengths", "slots"))
def _states_kernel(
    mixed, factors, solved, states, out, starts, lengths, slots, num_tokens, state_slot, HEADS: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs: by BLOCK columns of a head's states, and by row, whose chunks come one after another."""
    after_previous_kernel(PDL)
    VALUE_HEADS: tl.constexpr = HEADS * GROUP
    CHANNELS: tl.constexpr = HEADS * 2 * K + VALUE_HEADS * V
    CUTS: tl.constexpr = mixed.dtype.element_ty == tl.bfloat16
    head, column = tl.program_id(0) // (V // BLOCK), tl.program_id(0) % (V // BLOCK) * BLOCK
    row = tl.program_id(1)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        i, k, v = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, BLOCK)
        slot = tl.load(slots + row).to(tl.int64)
        states += slot * state_slot + head * (K * V) + column
        known = tl.where(tl.load(lengths + row) > end - begin, K, 0)
        state = tl.load(states + k[:, None] * V + v[None, :], mask=(k < known)[:, None], other=0.0)
        plane = num_tokens.to(tl.int64) * VALUE_HEADS
        for start in range(begin, end, CHUNK):
            real = start + i < end
            at = (start + i).to(tl.int64)
            query_at = mixed + at[:, None] * CHANNELS + (head // GROUP) * K + k[None, :]
            query = tl.load(query_at, mask=real[:, None], other=0.0)
            key = tl.load(query_at + HEADS * K, mask=real[:, None], other=0.0)
            value_at = mixed + at[:, None] * CHANNELS + (2 * HEADS * K + head * V + column) + v[None, :]
            value = tl.load(value_at, mask=real[:, None], other=0.0).to(tl.float32)
            place = factors + at * VALUE_HEADS + head
            grown = tl.load(place, mask=real, other=0.0)
            query_scale = tl.load(place + plane, mask=real, other=0.0)
            key_scale = tl.load(place + 2 * plane, mask=real, other=0.0)
            last = tl.load(factors + (tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * VALUE_HEADS + head)
            lines = solved + (at * VALUE_HEADS + head)[:, None] * CHUNK + i[None, :]
            matrix = tl.load(lines, mask=real[:, None], other=0.0)
            decay = tl.exp(grown)
            lacking = value - (decay * key_scale)[:, None] * dot_wide(key, state, INTERPRETED)
            new = dot_both_wide(matrix, lacking, CUTS, INTERPRETED)
            seen = (i[:, None] >= i[None, :]) & real[:, None]
            pairs = tl.exp(tl.where(seen, grown[:, None] - grown[None, :], 0.0))
            scores = dot(query, tl.trans(key), INTERPRETED) * query_scale[:, None] * key_scale[None, :] * pairs
            made = (decay * query_scale)[:, None] * dot_wide(query, state, INTERPRETED)
            made += dot_both_wide(tl.where(seen, scores, 0.0), new, CUTS, INTERPRETED)
            line = out + (at * VALUE_HEADS + head)[:, None] * V + column + v[None, :]
            tl.store(line, made.to(out.dtype.element_ty), mask=real[:, None])
            kept = new * (tl.exp(last - grown) * key_scale)[:, None]
            state = state * tl.exp(last) + dot_wide(tl.trans(key), kept, INTERPRETED)
        tl.store(states + k[:, None] * V + v[None, :], state)


def packed_delta_rule_triton(mixed: torch.Tensor, gates: DeltaGates, states: torch.Tensor, rows: PackedRows, *,
                             block: int = 32, num_warps: int = 4, num_stages: int = 2) -> torch.Tensor:
    """:func:`packed_delta_rule` as two Triton launches; ``block``: columns of a state of one program.

    The second takes 848 us on an H100 for a prompt of 8,192 tokens of 32 heads of 128 x 128 in bfloat16.
    """
    require_triton()
    (tokens, heads, group), (_, value_heads, key_dim, value_dim) = gates.alpha.shape, states.shape
    out = torch.empty(tokens, value_heads, value_dim, dtype=mixed.dtype, device=mixed.device)
    if not tokens:
        return out
    factors = torch.empty(3, tokens, value_heads, dtype=torch.float32, device=mixed.device)
    solved = torch.empty(tokens, value_heads, CHUNK, dtype=torch.float32, device=mixed.device)
    sizes = {"HEADS": heads, "GROUP": group, "K": key_dim, "V": value_dim, "CHUNK": CHUNK,
             "INTERPRETED": triton.knobs.runtime.interpret, **pdl_options(out)}
    strides = (*gates.alpha.stride()[:2], *gates.beta.stride()[:2])
    block = min(block, value_dim)
    with on_device_of(out):
        _chunks_kernel[(value_heads, tokens // CHUNK + len(rows.slots))](
            mixed, *gates, factors, solved, rows.starts, len(rows.slots), tokens, *strides, L2_EPS=L2_EPS,
            ROOT=key_dim**0.5, num_warps=num_warps, enable_fp_fusion=False,
            **sizes,
        )
        _states_kernel[(value_heads * (value_dim // block), len(rows.slots))](
            mixed, factors, solved, states, out, *rows, tokens, states.stride(0), BLOCK=block, num_warps=num_warps,
            num_stages=num_stages, **sizes,
        )
    return out
