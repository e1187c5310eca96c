# mypy: disallow-untyped-defs=False
"""Stock's logits processors over rows of a batch, each with the settings of its slot, in a few launches without a sync.

Scores are copied to fp32 once; most stages then touch only tokens that they change, and a program ends at once if its
row has no such setting. The reference is `hf_paged.sampling.edit_reference`.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._checks import Expected, check_logits, check_tensors, position_dtype
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton
from hf_paged.sampling.edit_reference import EditTable, decay_strength
from hf_paged.sampling.table import MIN_LENGTH, SamplingTable, int_setting

# Programs per row's history or list, and the elements of their tiles; then tiles of rules and of a whole row.
_PROGRAMS, _TILE = 8, 512
_RULE_TILE = 128
_ROW_TILE = 4096


@jit(varying_ints=("width", "history_stride"), varying_pointers=("lists", "lines", "slots", "position", "history"))
def _add_biases_kernel(
    scores, lists, lines, slots, position, history, vocab_size, width, history_stride, TILE: tl.constexpr
):
    """Add to each target of a row's rules the sum, in their order, of the biases of matching rules."""
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(slots + row), tl.load(position + row).to(tl.int64)
    line = lists + tl.load(lines + slot) * width
    history += slot * history_stride
    count = tl.load(line)
    if tl.program_id(1) * TILE < count:
        number = tl.program_id(1) * TILE + tl.arange(0, TILE)
        listed = number < count
        target = tl.load(line + 1 + 3 * number, mask=listed, other=-1)
        first = tl.load(line + 2 + 3 * number, mask=listed, other=0)
        end = tl.load(line + 3 + 3 * number, mask=listed, other=0)
        bias = tl.zeros([TILE], tl.float32)
        for step in range(0, tl.max(end - first, 0), 4):
            rule = first + step
            matched = rule < end
            prefix = tl.load(line + rule, mask=matched, other=0)
            length = tl.load(line + rule + 1, mask=matched, other=0)
            least = tl.load(line + rule + 2, mask=matched, other=0)
            value = tl.load(line + rule + 3, mask=matched, other=0).to(tl.float32, bitcast=True)
            matched &= place >= least
            for i in range(tl.max(length, 0)):
                compared = matched & (i < length)
                wanted = tl.load(line + prefix + i, mask=compared, other=0)
                matched &= tl.load(history + place - length + i, mask=compared, other=0) == wanted
            bias += tl.where(matched, value, 0.0)
        inside = (target >= 0) & (target < vocab_size)
        at = scores + row * vocab_size + target
        tl.store(at, tl.load(at, mask=inside, other=0.0) + bias, mask=inside)


@jit()
def _penalise(source, scores, token, penalty, vocab_size):
    inside = (token >= 0) & (token < vocab_size)
    score = tl.load(source + token, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + token, tl.where(score < 0.0, score * penalty, tl.div_rn(score, penalty)), mask=inside)


@jit(
    varying_ints=("source_stride", "width", "history_stride"),
    varying_pointers=("penalties", "lists", "lines", "slots", "position", "history"),
)
def _penalise_seen_kernel(
    source, scores, penalties, lists, lines, slots, position, history, source_stride, vocab_size, width,
    history_stride, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):
    """Penalise the tokens of a row's history and list; reads ``source``, so that a repeated token is penalised once."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    penalty = tl.load(penalties + slot)
    if penalty != 1.0:
        source += row * source_stride
        scores += row * vocab_size
        history += slot * history_stride
        length = tl.load(position + row).to(tl.int32)
        for start in range(tl.program_id(1) * TILE, length, PROGRAMS * TILE):
            at = start + tl.arange(0, TILE)
            _penalise(source, scores, tl.load(history + at, mask=at < length, other=-1), penalty, vocab_size)
        line = lists + tl.load(lines + slot) * width
        count = tl.load(line)
        for start in range(tl.program_id(1) * TILE, count, PROGRAMS * TILE):
            at = start + tl.arange(0, TILE)
            _penalise(source, scores, tl.load(line + 1 + at, mask=at < count, other=-1), penalty, vocab_size)


@jit(
    varying_ints=("history_stride",),
    varying_pointers=("presence", "frequency", "prompt_length", "slots", "position", "history"),
)
def _count_kernel(
    counts, presence, frequency, prompt_length, slots, position, history, vocab_size, history_stride,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):
    """Count how often each token was generated, in rows with presence or frequency penalties."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (tl.load(presence + slot) != 0.0) | (tl.load(frequency + slot) != 0.0):
        counts += row * vocab_size
        history += slot * history_stride
        start, length = tl.load(prompt_length + slot).to(tl.int32), tl.load(position + row).to(tl.int32)
        for first in range(start + tl.program_id(1) * TILE, length, PROGRAMS * TILE):
            at = first + tl.arange(0, TILE)
            token = tl.load(history + at, mask=at < length, other=-1)
            tl.atomic_add(counts + token, 1, mask=(token >= 0) & (token < vocab_size))


@jit(varying_pointers=("presence", "frequency", "slots"))
def _penalise_counts_kernel(scores, counts, presence, frequency, slots, vocab_size, TILE: tl.constexpr):
    """Subtract presence and frequency penalties; covers whole rows but writes only generated tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    once, each = tl.load(presence + slot), tl.load(frequency + slot)
    if (once != 0.0) | (each != 0.0):
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        count = tl.load(counts + row * vocab_size + token, mask=token < vocab_size, other=0)
        at = scores + row * vocab_size + token
        score = tl.load(at, mask=count > 0, other=0.0)
        tl.store(at, score - count.to(tl.float32) * each - once, mask=count > 0)


@jit(varying_ints=("history_stride",), varying_pointers=("sizes", "slots", "position", "history"))
def _bar_repeated_ngrams_kernel(
    scores, sizes, slots, position, history, vocab_size, history_stride, PROGRAMS: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot, length = tl.load(slots + row), tl.load(position + row).to(tl.int32)
    size = tl.load(sizes + slot).to(tl.int32)
    if (size > 0) & (length >= size):
        history += slot * history_stride
        windows = length - size + 1
        for start in range(tl.program_id(1) * TILE, windows, PROGRAMS * TILE):
            at = start + tl.arange(0, TILE)
            repeated = at < windows
            for i in range(size - 1):
                wanted = tl.load(history + windows + i)  # one of the sequence's last size - 1 tokens
                repeated &= tl.load(history + at + i, mask=repeated, other=-1) == wanted
            token = tl.load(history + at + size - 1, mask=repeated, other=-1)
            tl.store(scores + row * vocab_size + token, float("-inf"), mask=(token >= 0) & (token < vocab_size))


@jit(varying_ints=("num_eos",), varying_pointers=("slots", "position"))
def _bar_eos_kernel(scores, ints, eos, slots, position, vocab_size, num_eos):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if tl.load(position + row) < int_setting(ints, slot, MIN_LENGTH):
        for i in range(num_eos):
            token = tl.load(eos + slot * num_eos + i)
            tl.store(scores + row * vocab_size + token, float("-inf"), mask=(token >= 0) & (token < vocab_size))


@jit(
    varying_ints=("width",),
    varying_pointers=("forced_bos", "forced_eos_at", "remove_invalid", "lists", "lines", "slots", "position"),
)
def _force_kernel(
    scores, forced_bos, forced_eos_at, remove_invalid, lists, lines, slots, position, vocab_size, width,
    TILE: tl.constexpr,
):
    """Force the first or the last token, then remove invalid values; covers whole rows."""
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(slots + row), tl.load(position + row)
    bos = tl.load(forced_bos + slot)
    begins, ends = (place == 1) & (bos >= 0), place == tl.load(forced_eos_at + slot)
    cures = tl.load(remove_invalid + slot) != 0
    if begins | ends | cures:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        at = scores + row * vocab_size + token
        score = tl.load(at, mask=token < vocab_size, other=0.0)
        if begins | ends:
            score = tl.where(begins & (token == bos), 0.0, float("-inf"))
        if ends:
            line = lists + tl.load(lines + slot) * width
            score = tl.full([TILE], float("-inf"), tl.float32)
            for i in range(tl.load(line)):
                score = tl.where(token == tl.load(line + 1 + i), 0.0, score)
        if cures:
            score = tl.where(score != score, 0.0, score)
            score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
        tl.store(at, score, mask=token < vocab_size)


@jit(
    varying_ints=("width",), varying_pointers=("strengths", "decay_start", "lists", "lines", "slots", "position")
)
def _favour_eos_kernel(
    scores, strengths, decay_start, lists, lines, slots, position, vocab_size, width,
    FINITE_ONLY: tl.constexpr, TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if tl.load(position + row).to(tl.int64) > tl.load(decay_start + slot):
        strength = tl.load(strengths + row)
        line = lists + tl.load(lines + slot) * width
        count = tl.load(line)
        for start in range(0, count, TILE):
            number = start + tl.arange(0, TILE)
            token = tl.load(line + 1 + number, mask=number < count, other=-1)
            inside = (token >= 0) & (token < vocab_size)
            at = scores + row * vocab_size + token
            score = tl.load(at, mask=inside, other=0.0)
            size = tl.abs(score)
            penalty = size * strength
            if FINITE_ONLY:
                penalty = tl.where(size < float("inf"), penalty, 0.0)
            tl.store(at, score + penalty, mask=inside)


@jit(varying_ints=("width",), varying_pointers=("begin", "lists", "lines", "slots", "position"))
def _bar_kernel(
    scores, begin, lists, lines, slots, position, vocab_size, width, AT_BEGIN: tl.constexpr, PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Set the tokens of a row's list to -inf, always or only at the row's `begin`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    line = lists + tl.load(lines + slot) * width
    count = tl.load(line)
    if AT_BEGIN:
        count = tl.where(tl.load(position + row) == tl.load(begin + slot), count, 0)
    for start in range(tl.program_id(1) * TILE, count, PROGRAMS * TILE):
        number = start + tl.arange(0, TILE)
        token = tl.load(line + 1 + number, mask=number < count, other=-1)
        tl.store(scores + row * vocab_size + token, float("-inf"), mask=(token >= 0) & (token < vocab_size))


def edit_logits(
    logits: torch.Tensor, sampling: SamplingTable, table: EditTable, slots: torch.Tensor, position: torch.Tensor,
    history: torch.Tensor, features: frozenset[str], *, decays_finite_only: bool,
) -> torch.Tensor:
    """Return scores after the processors before temperature, in stock's order, minimum length included.

    Settings are read on the device: until a table moves, one CUDA graph serves every mix of rows.

    Args:
        logits: ``[R, V]``, bfloat16, float16 or float32; the last dim is contiguous. Not changed.
        sampling: EOS and minimum length of S slots.
        table: The other settings of S slots, on the logits' device.
        slots: ``[R]`` int64, contiguous.
        position: ``[R]`` int64 or int32, contiguous: number of each row's tokens in ``history``.
        history: ``[>= S, capacity]`` int32, the last dim contiguous.
        features: Names of the stages to run, from `Edits.features`.
        decays_finite_only: Whether the length penalty skips infinite scores (as in transformers since 5.23).

    Returns:
        ``[R, V]`` float32, contiguous.

    Raises:
        ValueError: If shapes, dtypes or strides are not as above.
        RuntimeError: If Triton is not installed.
    """
    check_logits(logits)
    check_tensors(
        Expected("slots", slots, (len(logits),), torch.int64, contiguous=True),
        Expected("position", position, (len(logits),), position_dtype(position), contiguous=True),
        Expected("history", history, (None, None), torch.int32),
    )
    require_triton()
    num_rows, vocab_size = logits.shape
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return scores
    rows, stride, shared = (slots, position), history.stride(0), {"PROGRAMS": _PROGRAMS, "TILE": _TILE}

    def add_biases(name: str) -> None:
        lists = table.lists[name]
        most = max(1, (lists.shape[1] - 1) // 7)  # a target takes three numbers, and its rule at least four
        _add_biases_kernel[(num_rows, -(-most // _RULE_TILE))](
            scores, lists, table.lines[name], *rows, history, vocab_size, lists.shape[1], stride, TILE=_RULE_TILE,
            enable_fp_fusion=False,
        )

    def bar(name: str, at_begin: bool) -> None:
        lists = table.lists[name]
        _bar_kernel[(num_rows, _PROGRAMS)](
            scores, table.begin, lists, table.lines[name], *rows, vocab_size, lists.shape[1], AT_BEGIN=at_begin,
            **shared,
        )

    with on_device_of(logits):
        source = logits
        if "sequence_bias" in features:
            add_biases("sequence_bias")
            source = scores
        if "repetition_penalty" in features:
            if source is scores:
                source = scores.clone()
            lists = table.lists["also_seen"]
            _penalise_seen_kernel[(num_rows, _PROGRAMS)](
                source, scores, table.repetition_penalty, lists, table.lines["also_seen"], *rows, history,
                source.stride(0), vocab_size, lists.shape[1], stride, **shared, enable_fp_fusion=False,
            )
        if "counts" in features:
            counts = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
            penalties = table.presence_penalty, table.frequency_penalty
            _count_kernel[(num_rows, _PROGRAMS)](
                counts, *penalties, table.prompt_length, *rows, history, vocab_size, stride, **shared
            )
            _penalise_counts_kernel[(num_rows, triton.cdiv(vocab_size, _ROW_TILE))](
                scores, counts, *penalties, slots, vocab_size, TILE=_ROW_TILE, enable_fp_fusion=False
            )
        if "no_repeat_ngram" in features:
            _bar_repeated_ngrams_kernel[(num_rows, _PROGRAMS)](
                scores, table.no_repeat_ngram_size, *rows, history, vocab_size, stride, **shared
            )
        if "bad_words" in features:
            add_biases("bad_words")
        _bar_eos_kernel[(num_rows,)](
            scores, sampling.ints, sampling.eos, *rows, vocab_size, sampling.eos.shape[1], num_warps=1
        )
        if features & {"forced_bos", "forced_eos", "remove_invalid"}:
            lists = table.lists["forced_eos"]
            _force_kernel[(num_rows, triton.cdiv(vocab_size, _ROW_TILE))](
                scores, table.forced_bos, table.forced_eos_at, table.remove_invalid, lists, table.lines["forced_eos"],
                *rows, vocab_size, lists.shape[1], TILE=_ROW_TILE,
            )
        if "decay" in features:
            lists = table.lists["decay_eos"]
            _favour_eos_kernel[(num_rows,)](
                scores, decay_strength(table, *rows), table.decay_start, lists, table.lines["decay_eos"], *rows,
                vocab_size, lists.shape[1], FINITE_ONLY=decays_finite_only, TILE=32, num_warps=1,
                enable_fp_fusion=False,
            )
        if "suppress" in features:
            bar("suppress", at_begin=False)
        if "begin_suppress" in features:
            bar("begin_suppress", at_begin=True)
    return scores
