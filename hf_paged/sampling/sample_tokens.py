# mypy: disallow-untyped-defs=False
"""Sampling of one token per row: greedy, or temperature, top-k, top-p and min-p, in two launches without a sort.

Without filters a row is sampled by Gumbel-max in two levels (Maddison et al. 2014, "A* sampling"): the largest
perturbed score of a group is Gumbel-distributed about the group's logsumexp, independent of its position. So one number
per group chooses the group, one per token of that group the token, and the pass over the logits is a maximum and a sum
of exponentials. Rows with filters use the same group values to find the few tokens that can survive
(`_filtered_token`). The reference is `hf_paged.sampling.sampler.sample_reference`.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._checks import Expected, check_logits, check_tensors, position_dtype
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton
from hf_paged.sampling._filtered_token import (
    filtered_token,
    gather_candidates,
    is_filtered,
    least_score,
    load_scores,
    weight_of,
)
from hf_paged.sampling.gumbel import GROUP_STREAM, gumbel_noise, row_keys
from hf_paged.sampling.table import (
    MIN_LENGTH,
    NUM_FLOATS,
    NUM_INTS,
    SEED,
    TEMPERATURE,
    SamplingTable,
    float_setting,
    int_setting,
)

# Tokens of a group. Changing it changes the tokens of every seed.
GROUP_SIZE = 1024
# Programs of one warp that fill a large GPU twice; with more groups, a program takes several.
PROGRAMS = 8192
# Candidates of a filtered row; with more, the row is searched in place, which is slower.
_HELD = 4096
_PIECE = 32
# Elements in a tile of a program of 256 threads: of candidates, of pieces, of a row.
_HELD_TILE, _PIECE_TILE, _ROW_TILE = 1024, 2048, 2048


@jit()
def first_of_best(value, index, among):
    """Return the lowest ``index`` with the largest value ``among`` the marked; 2**31 - 1 if none is marked."""
    best = tl.max(tl.where(among, value, float("-inf")), 0)
    return tl.min(tl.where(among & (value == best), index, 0x7FFFFFFF), 0)


@jit()
def best_of_group(logits, token, end, eos, num_eos, eos_barred, temperature, key0, key1, INTERPRETED: tl.constexpr):
    """Return the scores of a group's tokens, those before ``end``, and the best one, for a temperature perturbed."""
    scores = load_scores(logits, token, token < end, eos, num_eos, eos_barred)
    value, among = scores, token < end
    if temperature != 0.0:
        value = tl.div_rn(scores, temperature) + gumbel_noise(token, key0, key1, INTERPRETED)
        among = scores > float("-inf")
    return scores, first_of_best(value, token, among)


@jit()
def _scale_of(temperature):
    """Return the factor of scores for exp2; finite, so that a difference of 0 stays 0."""
    return tl.minimum(1.4426950408889634 / tl.where(temperature == 0.0, 1.0, temperature), 1e38)


@jit(varying_ints=("num_groups", "groups_each", "num_eos"), varying_pointers=("slots", "position"))
def group_stats_kernel(
    logits, floats, ints, eos, slots, position, group_top, group_mass, piece_top, row_stride, vocab_size, num_groups,
    groups_each, num_eos, first, GROUP: tl.constexpr, PIECE: tl.constexpr, LOGPROB: tl.constexpr,
):
    """Compute each group's maximum, and its sum of exponentials relative to the maximum.

    The sum is NaN if the group makes its row invalid. For rows with filters, also computes the maximum of every piece
    (unless PIECE is 0). A row's columns are the tokens ``first`` to ``vocab_size - 1``.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = float_setting(floats, slot, TEMPERATURE)
    filtered = is_filtered(temperature, floats, ints, slot)
    eos_barred = tl.load(position + row) < int_setting(ints, slot, MIN_LENGTH)
    scale = _scale_of(temperature)
    begin = tl.program_id(1) * groups_each
    for group in range(begin, tl.minimum(begin + groups_each, num_groups)):
        token = first + group * GROUP + tl.arange(0, GROUP)
        columns = logits + row * row_stride - first
        score = load_scores(columns, token, token < vocab_size, eos + slot * num_eos, num_eos, eos_barred)
        top = tl.max(score, 0)
        if temperature != 0.0:
            mass = tl.sum(weight_of(score, tl.where(top == float("-inf"), 0.0, top), scale), 0)  # +inf makes it NaN
        else:
            mass = tl.full((), 1.0, tl.float32)
            if LOGPROB:
                mass = tl.sum(weight_of(score, tl.where(top == float("-inf"), 0.0, top), scale), 0)
                mass = tl.where(top == float("inf"), 1.0, mass)
            mass = tl.where(tl.max((score != score).to(tl.int32), 0) > 0, float("nan"), mass)
        if PIECE > 0:  # noqa: SIM102  (decided at compile time)
            if filtered:
                piece = (row * num_groups + group) * (GROUP // PIECE) + tl.arange(0, GROUP // PIECE)
                tops = tl.max(tl.reshape(score, [GROUP // PIECE, PIECE]), 1)
                tl.store(piece_top + piece, tops.to(piece_top.dtype.element_ty))
        tl.store(group_top + row * num_groups + group, top)
        tl.store(group_mass + row * num_groups + group, mass)


@jit(varying_ints=("num_groups", "num_eos", "history_stride"), varying_pointers=("slots", "position", "history"))
def _choose_kernel(
    logits, floats, ints, eos, slots, position, group_top, group_mass, piece_top, listed, held_score, held_token, out,
    logprob, history, row_stride, vocab_size, num_groups, num_eos, history_stride,
    GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP_STREAM: tl.constexpr, PIECE: tl.constexpr, HELD: tl.constexpr,
    HELD_TILE: tl.constexpr, PIECE_TILE: tl.constexpr, ROW_TILE: tl.constexpr, SHIFT: tl.constexpr,
    HISTORY: tl.constexpr, LOGPROB: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Choose a row's token from the groups' values and a second pass over the groups that matter."""
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(slots + row), tl.load(position + row).to(tl.int64)
    logits += row * row_stride
    eos += slot * num_eos
    temperature = float_setting(floats, slot, TEMPERATURE)
    eos_barred = place < int_setting(ints, slot, MIN_LENGTH)
    key0, key1 = row_keys(int_setting(ints, slot, SEED), place)
    scale, drawn = _scale_of(temperature), temperature != 0.0

    group = tl.arange(0, GROUPS_PAD)
    tops = tl.load(group_top + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    masses = tl.load(group_mass + row * num_groups + group, mask=group < num_groups, other=0.0)
    live = tops > float("-inf")
    top = tl.max(tops, 0)
    top = tl.where(top == 0.0, 0.0, top)  # turns -0.0, whose integer orders below that of 0.0, into 0.0
    bad = tl.max((masses != masses).to(tl.int32), 0) > 0
    bad |= drawn & (top == float("-inf"))
    token, score, total = tl.full((), -1, tl.int32), top, tl.full((), 1.0, tl.float32)
    if not bad:
        relative = tl.where(live, masses * weight_of(tops, top, scale), 0.0)
        total = tl.sum(relative, 0)
        if is_filtered(temperature, floats, ints, slot):
            num_pieces = num_groups * (GROUP // PIECE)
            piece_top += row * num_pieces
            held_score += row * HELD
            held_token += row * HELD
            least = least_score(
                piece_top, num_pieces, tops, relative, live, top, total, temperature, scale, floats, ints, slot,
                GROUP, PIECE_TILE, SHIFT,
            )
            size = gather_candidates(
                logits, eos, num_eos, eos_barred, piece_top, num_pieces, least, listed + row * HELD, held_score,
                held_token, vocab_size, PIECE, HELD, PIECE_TILE, ROW_TILE // PIECE,
            )
            if size <= HELD:
                token, score, total = filtered_token(
                    held_score, held_token, size, eos, num_eos, eos_barred, least, top, total, temperature, scale,
                    floats, ints, slot, key0, key1, HELD_TILE, False, SHIFT, INTERPRETED,
                )
            else:
                token, score, total = filtered_token(
                    logits, held_token, vocab_size, eos, num_eos, eos_barred, least, top, total, temperature, scale,
                    floats, ints, slot, key0, key1, ROW_TILE, True, SHIFT, INTERPRETED,
                )
        else:
            # Greedy may take -inf, the first one; sampling takes logits above -inf even if the division gives -inf.
            value, among = tops, group < num_groups
            if drawn:
                noise = gumbel_noise(group.to(tl.uint32) + GROUP_STREAM, key0, key1, INTERPRETED)
                value, among = tl.div_rn(tops, temperature) + tl.log(masses) + noise, live
            at = first_of_best(value, group, among) * GROUP + tl.arange(0, GROUP)
            scores, token = best_of_group(
                logits, at, vocab_size, eos, num_eos, eos_barred, temperature, key0, key1, INTERPRETED
            )
            score = tl.max(tl.where(at == token, scores, float("-inf")), 0)
    tl.store(out + row, token.to(tl.int64))
    if LOGPROB:
        known = (score - top) * scale * 0.6931471805599453 - tl.log(total)
        tl.store(logprob + row, tl.where(bad, float("nan"), known))
    if HISTORY:
        # An invalid row ends at commit, but an overlapping step needs a valid token id.
        tl.store(history + slot * history_stride + place, tl.maximum(token, 0))


def sample_tokens(
    logits: torch.Tensor, table: SamplingTable, slots: torch.Tensor, position: torch.Tensor, *,
    history: torch.Tensor | None = None, logprob: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token per row, a function of the row's logits, settings, seed and position alone.

    The grid follows from shapes, and settings are read on the device: one CUDA graph serves every mix of rows. Tokens
    equal the reference's unless two perturbed scores, or a mass and its limit, are within rounding.

    Args:
        logits: ``[R, V]``, bfloat16, float16 or float32; rows may be strided, the last dim is contiguous.
        table: Settings of S slots, each tensor contiguous.
        slots: ``[R]`` int64, the rows' lines of the table.
        position: ``[R]`` int64 or int32, the tokens' positions in their sequences, ``0 .. 2**32 - 1``.
        history: ``[>= S, capacity]`` int32; receives the token at [slot, position], 0 for an invalid row.
        logprob: ``[R]`` float32, receives the token's log-probability under the distribution that it was sampled from
            (greedy: softmax of the logits, EOS barred); NaN for an invalid row.

    Returns:
        ``[R]`` int64; greedy ties go to the lowest index. -1 where stock's ``argmax`` or ``multinomial`` would fail:
        NaN anywhere in the row; when sampling, also +inf or no score above -inf.

    Raises:
        ValueError: If shapes, dtypes or strides are not as above.
        RuntimeError: If Triton is not installed.
    """
    _check(logits, table, slots, position, history, logprob)
    require_triton()
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    num_groups = -(-vocab_size // GROUP_SIZE)
    groups_each = min(num_groups, -(-num_rows * num_groups // PROGRAMS))
    group_top, group_mass = (torch.empty(num_rows, num_groups, dtype=torch.float32, device=device) for _ in range(2))
    piece_top = torch.empty(num_rows, num_groups * (GROUP_SIZE // _PIECE), dtype=logits.dtype, device=device)
    listed, held_token = (torch.empty(num_rows, _HELD, dtype=torch.int32, device=device) for _ in range(2))
    held_score = torch.empty(num_rows, _HELD, dtype=logits.dtype, device=device)
    settings = (logits, *table, slots, position, group_top, group_mass, piece_top)
    with on_device_of(logits):
        group_stats_kernel[(num_rows, -(-num_groups // groups_each))](
            *settings, logits.stride(0), vocab_size, num_groups, groups_each, table.eos.shape[1], 0,
            GROUP=GROUP_SIZE, PIECE=_PIECE, LOGPROB=logprob is not None,
            num_warps=1,  # a group of 1024 is four 16-byte loads per thread, and its sums need no barrier
            enable_fp_fusion=False,
        )
        _choose_kernel[(num_rows,)](
            *settings, listed, held_score, held_token, out, out if logprob is None else logprob,
            out if history is None else history, logits.stride(0), vocab_size, num_groups, table.eos.shape[1],
            0 if history is None else history.stride(0),
            GROUP=GROUP_SIZE, GROUPS_PAD=triton.next_power_of_2(num_groups), GROUP_STREAM=GROUP_STREAM, PIECE=_PIECE,
            HELD=_HELD, HELD_TILE=_HELD_TILE, PIECE_TILE=_PIECE_TILE, ROW_TILE=_ROW_TILE,
            SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype],
            HISTORY=history is not None, LOGPROB=logprob is not None, INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=8,
            maxnreg=128,  # two programs per multiprocessor: 256 rows run at once on a large GPU
            enable_fp_fusion=False,
        )
    return out


def _check(
    logits: torch.Tensor, table: SamplingTable, slots: torch.Tensor, position: torch.Tensor,
    history: torch.Tensor | None, logprob: torch.Tensor | None,
) -> None:
    check_logits(logits)
    rows, lines = len(logits), len(table.floats)
    check_tensors(
        Expected("floats", table.floats, (lines, NUM_FLOATS), torch.float32, contiguous=True),
        Expected("ints", table.ints, (lines, NUM_INTS), torch.int64, contiguous=True),
        Expected("eos", table.eos, (lines, None), torch.int64, contiguous=True),
        Expected("slots", slots, (rows,), torch.int64, contiguous=True),
        Expected("position", position, (rows,), position_dtype(position), contiguous=True),
    )
    if logprob is not None:
        check_tensors(Expected("logprob", logprob, (rows,), torch.float32, contiguous=True))
    if history is not None:
        check_tensors(Expected("history", history, (None, None), torch.int32))
        if len(history) < lines:
            raise ValueError(f"history must have at least {lines} lines, got {len(history)}")
