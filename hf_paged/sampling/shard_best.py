# mypy: disallow-untyped-defs=False
"""Sampling over ranks that each have some columns of the logits, for rows without filters.

A rank's best token of a row is an int64 key with the order of the (perturbed) scores, the lowest token first among
equals. The maximum of the ranks' keys is the token that `sample_tokens` takes from the whole row, since both levels of
its choice are maxima. A rank's columns begin at a multiple of the sampler's group size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton
from hf_paged.sampling.gumbel import GROUP_STREAM, gumbel_noise, row_keys
from hf_paged.sampling.sample_tokens import GROUP_SIZE, PROGRAMS, best_of_group, first_of_best, group_stats_kernel
from hf_paged.sampling.sampler import SamplingRows, bar_eos, drawn_in_groups
from hf_paged.sampling.table import MIN_LENGTH, SEED, TEMPERATURE, SamplingTable, float_setting, int_setting

NO_TOKEN = -(2**63)  # below every key: the rank has no token for the row
INVALID = 2**63 - 1  # above every key: the rank's columns make the whole row invalid
_TOKEN_BITS = 0xFFFFFFFF


class Columns(NamedTuple):
    """A rank's columns: the tokens ``first`` to ``end - 1`` of a vocabulary; further columns are padding."""

    first: int
    end: int


def best_of_shard(logits: torch.Tensor, columns: Columns, table: SamplingTable, slots: torch.Tensor,
                  position: torch.Tensor) -> torch.Tensor:
    """Return keys int64 [R] of the best token of each row among this rank's columns.

    Args:
        logits: ``[R, >= columns.end - columns.first]``, bfloat16, float16 or float32; the last dim is contiguous.
        columns: ``first`` is a multiple of `GROUP_SIZE`.
        table, slots, position: As for `sample_tokens`; filters are ignored.

    Raises:
        ValueError: If columns start inside a group.
    """
    if columns.first % GROUP_SIZE:
        raise ValueError(f"columns.first={columns.first}: expected a multiple of {GROUP_SIZE}")
    if columns.end <= columns.first:
        return torch.full((len(logits),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    run = best_of_shard_triton if logits.is_cuda else best_of_shard_reference
    return run(logits, columns, table, slots, position)


def settle_tokens(keys: torch.Tensor, slots: torch.Tensor, position: torch.Tensor,
                  history: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [R] of the maximum ``keys`` [R], -1 for invalid rows, and write them to ``history``."""
    run = settle_tokens_triton if keys.is_cuda else settle_tokens_reference
    return run(keys, slots, position, history)


def keys_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return keys of tokens [R] int64 (-1: an invalid row) that this rank alone has sampled."""
    return torch.where(tokens < 0, INVALID, _TOKEN_BITS - tokens)


def best_of_shard_reference(logits: torch.Tensor, columns: Columns, table: SamplingTable, slots: torch.Tensor,
                            position: torch.Tensor) -> torch.Tensor:
    count, rows = columns.end - columns.first, SamplingRows.of(table, slots, position)
    eos, drawn = rows.eos - columns.first, rows.drawn
    scores = bar_eos(logits[:, :count].float(), rows._replace(eos=eos.where(eos < count, -1)))
    top, token = scores.amax(dim=-1), scores.argmax(dim=-1)
    invalid = scores.isnan().any(dim=-1) | (drawn & (top == torch.inf))
    value = top.clone()
    if drawn.any():
        where = drawn.nonzero().flatten()
        some = rows.at(where)
        value[where], token[where] = drawn_in_groups(
            scores[where] / some.temperature[:, None], some.seed, some.position, columns.first
        )
    keys = _packed(value, token + columns.first)
    keys[drawn & (top == -torch.inf)] = NO_TOKEN
    return keys.masked_fill_(invalid, INVALID)


def _packed(value: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    bits = (value + 0.0).view(torch.int32).long()  # + 0.0 removes -0.0, whose bits order below those of 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (_TOKEN_BITS - token)


def settle_tokens_reference(keys: torch.Tensor, slots: torch.Tensor, position: torch.Tensor,
                            history: torch.Tensor) -> torch.Tensor:
    invalid = (keys == INVALID) | (keys == NO_TOKEN)
    tokens = (_TOKEN_BITS - (keys & _TOKEN_BITS)).masked_fill(invalid, -1)
    history[slots, position.long()] = tokens.clamp(min=0).to(history.dtype)
    return tokens


@jit(varying_ints=("num_groups", "num_eos"), varying_pointers=("slots", "position"))
def _best_of_shard_kernel(
    logits, floats, ints, eos, slots, position, group_top, group_mass, out, row_stride, first, end, num_groups, num_eos,
    GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP_STREAM: tl.constexpr, INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(slots + row), tl.load(position + row).to(tl.int64)
    temperature = float_setting(floats, slot, TEMPERATURE)
    eos_barred = place < int_setting(ints, slot, MIN_LENGTH)
    key0, key1 = row_keys(int_setting(ints, slot, SEED), place)
    drawn = temperature != 0.0

    group = tl.arange(0, GROUPS_PAD)
    inside = group < num_groups
    tops = tl.load(group_top + row * num_groups + group, mask=inside, other=float("-inf"))
    masses = tl.load(group_mass + row * num_groups + group, mask=inside, other=0.0)
    value, among = tops, inside
    if drawn:
        noise = gumbel_noise((first // GROUP + group).to(tl.uint32) + GROUP_STREAM, key0, key1, INTERPRETED)
        value, among = tl.div_rn(tops, temperature) + tl.log(masses) + noise, tops > float("-inf")
    best = tl.max(tl.where(among, value, float("-inf")), 0)
    chosen = first_of_best(value, group, among)
    at = first + chosen * GROUP + tl.arange(0, GROUP)
    _, token = best_of_group(
        logits + row * row_stride - first, at, end, eos + slot * num_eos, num_eos, eos_barred, temperature, key0, key1,
        INTERPRETED,
    )

    bits = (best + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (ordered << 32) | (0xFFFFFFFF - token.to(tl.int64))
    nothing = drawn & (tl.max(tops, 0) == float("-inf"))
    key = tl.where(nothing, -9223372036854775807 - 1, key)
    # A NaN sum of exponentials marks a row that stock could not sample from either.
    bad = tl.max((masses != masses).to(tl.int32), 0) > 0
    tl.store(out + row, tl.where(bad, 9223372036854775807, key))


def best_of_shard_triton(logits: torch.Tensor, columns: Columns, table: SamplingTable, slots: torch.Tensor,
                         position: torch.Tensor) -> torch.Tensor:
    require_triton()
    num_rows, device = len(logits), logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    num_groups = -(-(columns.end - columns.first) // GROUP_SIZE)
    groups_each = min(num_groups, -(-num_rows * num_groups // PROGRAMS))
    group_top, group_mass = (torch.empty(num_rows, num_groups, dtype=torch.float32, device=device) for _ in range(2))
    with on_device_of(logits):
        group_stats_kernel[(num_rows, -(-num_groups // groups_each))](
            logits, *table, slots, position, group_top, group_mass, group_top, logits.stride(0), columns.end,
            num_groups, groups_each, table.eos.shape[1], columns.first, GROUP=GROUP_SIZE, PIECE=0, LOGPROB=False,
            num_warps=1, enable_fp_fusion=False,
        )
        _best_of_shard_kernel[(num_rows,)](
            logits, *table, slots, position, group_top, group_mass, out, logits.stride(0), columns.first, columns.end,
            num_groups, table.eos.shape[1], GROUP=GROUP_SIZE, GROUPS_PAD=triton.next_power_of_2(num_groups),
            GROUP_STREAM=GROUP_STREAM, INTERPRETED=triton.knobs.runtime.interpret, num_warps=8, enable_fp_fusion=False,
        )
    return out


@jit(varying_ints=("num_rows", "history_stride"), varying_pointers=("slots", "position", "history"))
def _settle_tokens_kernel(keys, slots, position, history, out, num_rows, history_stride, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    key = tl.load(keys + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    place = tl.load(position + row, mask=inside, other=0).to(tl.int64)
    token = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    token = tl.where((key == 9223372036854775807) | (key == -9223372036854775807 - 1), -1, token)
    tl.store(out + row, token, mask=inside)
    # An invalid row ends at commit, but an overlapping step needs a valid token id.
    tl.store(history + slot * history_stride + place, tl.maximum(token, 0).to(tl.int32), mask=inside)


def settle_tokens_triton(keys: torch.Tensor, slots: torch.Tensor, position: torch.Tensor,
                         history: torch.Tensor) -> torch.Tensor:
    require_triton()
    out = torch.empty(len(keys), dtype=torch.int64, device=keys.device)
    if len(keys):
        with on_device_of(keys):
            _settle_tokens_kernel[(-(-len(keys) // 128),)](
                keys, slots, position, history, out, len(keys), history.stride(0), ROWS=128, num_warps=4
            )
    return out
