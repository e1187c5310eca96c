"""Stock's logits processors in torch, over rows with their own settings, for a CPU and as the kernels' reference.

Every stage takes float32 scores [R, V], which it may change, the rows' ``slots`` and ``position`` [R] int64, and
``history`` [S, capacity], and returns or updates the scores. A row whose slot does not use the stage is unchanged.
"""

from __future__ import annotations

import torch

from hf_paged.sampling.edit_lines import stock_decays_finite_only
from hf_paged.sampling.edit_logits import EditTable, decay_strength
from hf_paged.sampling.table import SamplingTable


def edited_scores(
    logits: torch.Tensor, sampling: SamplingTable, table: EditTable, slots: torch.Tensor, position: torch.Tensor,
    history: torch.Tensor, features: frozenset[str],
) -> torch.Tensor:
    """Return float32 scores [R, V] after the processors before temperature, for the stages in ``features``."""
    scores, position = logits.to(torch.float32, copy=True), position.long()
    if "sequence_bias" in features:
        add_biases(scores, table, "sequence_bias", slots, position, history)
    if "repetition_penalty" in features:
        scores = penalise_seen(scores, table, slots, position, history)
    if "counts" in features:
        scores = penalise_counts(scores, table, slots, position, history)
    if "no_repeat_ngram" in features:
        bar_repeated_ngrams(scores, table, slots, position, history)
    if "bad_words" in features:
        add_biases(scores, table, "bad_words", slots, position, history)
    bar(scores, sampling.eos[slots], position < sampling.int_settings(slots).min_length)
    if features & {"forced_bos", "forced_eos"}:
        force(scores, table, slots, position)
    if "remove_invalid" in features:
        scores = remove_invalid(scores, table, slots)
    if "decay" in features:
        favour_eos(scores, table, slots, position)
    if "suppress" in features:
        bar(scores, tokens_of(table, "suppress", slots))
    if "begin_suppress" in features:
        bar(scores, tokens_of(table, "begin_suppress", slots), position == table.begin[slots])
    return scores


def tokens_of(table: EditTable, name: str, slots: torch.Tensor) -> torch.Tensor:
    """Return the slots' lists of tokens [R, N] int64, padded with -1."""
    lines = table.lists[name][table.lines[name][slots]].long()
    count, tokens = lines[:, :1], lines[:, 1:]
    return tokens.where(torch.arange(tokens.shape[1], device=tokens.device) < count, -1)


def bar(scores: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor | None = None) -> None:
    """Set ``tokens`` [R, N] of the ``active`` rows [R] to -inf; ignores ids outside the vocabulary."""
    _assign(scores, tokens, -torch.inf, active)


def _assign(scores: torch.Tensor, tokens: torch.Tensor, value: float, active: torch.Tensor | None) -> None:
    there = (tokens >= 0) & (tokens < scores.shape[1])
    if active is not None:
        there &= active[:, None]
    row, at = there.nonzero(as_tuple=True)
    scores[row, tokens[row, at]] = value


def add_biases(
    scores: torch.Tensor, table: EditTable, name: str, slots: torch.Tensor, position: torch.Tensor,
    history: torch.Tensor,
) -> None:
    """Add biases to the last token of every sequence whose other tokens end the row, in stock's order of additions."""
    lines = table.lists[name][table.lines[name][slots]].long()
    most = int(lines[:, 0].max())
    if most == 0:
        return
    target, first, end = lines[:, 1 : 1 + 3 * most].unflatten(1, (most, 3)).unbind(2)
    listed = torch.arange(most, device=lines.device) < lines[:, :1]
    bias = torch.zeros(len(scores), most, dtype=torch.float32, device=scores.device)
    for number in range(int(((end - first) // 4).where(listed, 0).max())):
        rule = first + 4 * number
        matched = listed & (rule < end)
        begin, length, least, bits = (lines.gather(1, rule.where(matched, 0) + i) for i in range(4))
        matched &= position[:, None] >= least
        for i in range(int(length.where(matched, 0).max())):
            known = history[slots[:, None], (position[:, None] - length + i).clamp(0, history.shape[1] - 1)]
            wanted = lines.gather(1, (begin + i).clamp(max=lines.shape[1] - 1))
            matched &= (i >= length) | (known == wanted)
        bias += bits.to(torch.int32).view(torch.float32).where(matched, 0.0)
    row, at = (listed & (target < scores.shape[1])).nonzero(as_tuple=True)
    scores[row, target[row, at]] += bias[row, at]


def penalise_seen(
    scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor, history: torch.Tensor
) -> torch.Tensor:
    """Divide positive and multiply negative scores of the tokens seen, once per token."""
    vocab_size = scores.shape[1]
    seen = history[slots, : int(position.max())].long()
    seen = seen.where(torch.arange(seen.shape[1], device=seen.device) < position[:, None], -1)
    seen = torch.cat([seen, tokens_of(table, "also_seen", slots)], dim=1)
    seen = seen.where((seen >= 0) & (seen < vocab_size), vocab_size)
    wide = torch.nn.functional.pad(scores, (0, 1))
    penalty = table.repetition_penalty[slots][:, None]
    score = wide.gather(1, seen)
    score = torch.where(score < 0, score * penalty, score / penalty)
    return wide.scatter_(1, seen, score)[:, :vocab_size].contiguous()


def penalise_counts(
    scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor, history: torch.Tensor
) -> torch.Tensor:
    """Subtract the frequency penalty per occurrence of a generated token, and the presence penalty once."""
    vocab_size = scores.shape[1]
    generated = history[slots, : int(position.max())].long()
    at = torch.arange(generated.shape[1], device=scores.device)
    inside = (at >= table.prompt_length[slots][:, None]) & (at < position[:, None])
    generated = generated.where(inside & (generated >= 0) & (generated < vocab_size), vocab_size)
    counts = scores.new_zeros(len(scores), vocab_size + 1)
    counts = counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))[:, :vocab_size]
    once, each = table.presence_penalty[slots][:, None], table.frequency_penalty[slots][:, None]
    penalised = scores - counts * each - once
    return torch.where((counts > 0) & ((once != 0.0) | (each != 0.0)), penalised, scores)


def bar_repeated_ngrams(
    scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor, history: torch.Tensor
) -> None:
    """Set tokens to -inf that would complete an n-gram of the sequence again."""
    sizes = table.no_repeat_ngram_size[slots]
    for row in ((sizes > 0) & (position >= sizes)).nonzero().flatten().tolist():
        size, length = int(sizes[row]), int(position[row])
        tokens = history[slots[row], :length].long()
        windows = tokens.unfold(0, size, 1)
        repeated = (windows[:, :-1] == tokens[length + 1 - size :]).all(dim=1)
        bar(scores[row : row + 1], windows[repeated, -1][None])


def force(scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor) -> None:
    """Set forced tokens to 0 and all others to -inf, at position 1 and at the last allowed position."""
    bos = table.forced_bos[slots]
    at_begin, at_end = (position == 1) & (bos >= 0), position == table.forced_eos_at[slots]
    scores.masked_fill_((at_begin | at_end)[:, None], -torch.inf)
    _assign(scores, bos[:, None], 0.0, at_begin & ~at_end)
    _assign(scores, tokens_of(table, "forced_eos", slots), 0.0, at_end)


def remove_invalid(scores: torch.Tensor, table: EditTable, slots: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0, and infinities by the largest and the smallest finite number."""
    return torch.where((table.remove_invalid[slots] > 0)[:, None], scores.nan_to_num(), scores)


def favour_eos(scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor) -> None:
    """Raise EOS by a multiple of its absolute score that grows with every token after the start."""
    eos = tokens_of(table, "decay_eos", slots)
    there = (eos >= 0) & (eos < scores.shape[1]) & (position > table.decay_start[slots])[:, None]
    row, at = there.nonzero(as_tuple=True)
    score = scores[row, eos[row, at]]
    penalty = score.abs() * decay_strength(table, slots, position)[row]
    if stock_decays_finite_only():
        penalty = penalty.masked_fill(~score.isfinite(), 0.0)
    scores[row, eos[row, at]] = score + penalty
