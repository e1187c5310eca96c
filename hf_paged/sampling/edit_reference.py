"""Stock's logits processors over rows that each have their own settings: the settings, their columns, and in torch
what they do, which is the reference of `edit_logits` and what a CPU runs.

Every stage takes float32 scores [R, V], which it may change, the rows' ``slots`` and ``position`` [R] int64, and
``history`` [S, capacity], and returns or updates the scores. A row whose slot does not use the stage is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.sampling.edit_lines import encode_bars, encode_rules, encode_tokens, stock_decays_finite_only
from hf_paged.sampling.gumbel import exponential_noise
from hf_paged.sampling.sampler import SamplingRows, warped_scores
from hf_paged.sampling.table import SamplingTable

# The stages behind temperature, which have no kernel: torch runs them, on CUDA without a host sync.
WARPERS = frozenset({"typical", "epsilon", "eta"})
# Sorting a row of 150,000 tokens takes some 10 MB.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Edits:
    """What one request does to its logits; the defaults do nothing. Lengths and starts are in tokens of the request."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken off the score of every token that was generated
    frequency_penalty: float = 0.0  # as often as the token was generated
    also_seen: tuple[int, ...] = ()  # penalised as if they were in the sequence
    no_repeat_ngram_size: int = 0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # without single EOS tokens, which stock drops
    forced_bos_token_id: int | None = None  # the token after a prompt of one
    forced_eos_token_ids: tuple[int, ...] = ()  # the last allowed token
    remove_invalid_values: bool = False
    decay_start: int | None = None  # exponential_decay_length_penalty, in new tokens
    decay_factor: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    typical_p: float = 1.0  # this and the next two are for sampling requests only
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False

    def features(self) -> frozenset[str]:
        """Names of the stages that this request needs, to be given to `sample_edited`; empty for neutral settings."""
        return frozenset(name for name, is_on in STAGES.items() if is_on(self))


NEUTRAL = Edits()
STAGES: dict[str, Callable[[Edits], bool]] = {
    "sequence_bias": lambda edits: bool(edits.sequence_bias),
    "repetition_penalty": lambda edits: edits.repetition_penalty != 1.0,
    "counts": lambda edits: edits.presence_penalty != 0.0 or edits.frequency_penalty != 0.0,
    "no_repeat_ngram": lambda edits: edits.no_repeat_ngram_size > 0,
    "bad_words": lambda edits: bool(edits.bad_words_ids),
    "forced_bos": lambda edits: edits.forced_bos_token_id is not None,
    "forced_eos": lambda edits: bool(edits.forced_eos_token_ids),
    "remove_invalid": lambda edits: edits.remove_invalid_values,
    "decay": lambda edits: edits.decay_start is not None,
    "suppress": lambda edits: bool(edits.suppress_tokens),
    "begin_suppress": lambda edits: bool(edits.begin_suppress_tokens),
    "typical": lambda edits: edits.typical_p < 1.0,
    "epsilon": lambda edits: 0.0 < edits.epsilon_cutoff < 1.0,
    "eta": lambda edits: 0.0 < edits.eta_cutoff < 1.0,
    "renormalize": lambda edits: edits.renormalize_logits,
}


class EditTable(NamedTuple):
    """Settings of S slots on the logits' device, [S] each: what `Edits` says, neutral or not.

    Settings of any length lie in ``lists``, by name [lines, width] int32 padded with 0; ``lines`` names each slot's
    line there, line 0 holding nothing. A list of tokens is its length and the tokens. A list of rules is the number of
    targets, three numbers per target (token, where its first rule is, where they end), four per rule (where its prefix
    is, the prefix's length, tokens that the sequence must have, float32 bias as bits), and the prefixes' tokens.
    """

    repetition_penalty: torch.Tensor  # float32
    typical_p: torch.Tensor  # float32
    epsilon_cutoff: torch.Tensor  # float32
    eta_cutoff: torch.Tensor  # float32
    presence_penalty: torch.Tensor  # float32
    frequency_penalty: torch.Tensor  # float32
    decay_factor: torch.Tensor  # float64
    decay_start: torch.Tensor  # int64, as all below: sequences longer than this are decayed
    no_repeat_ngram_size: torch.Tensor
    forced_bos: torch.Tensor  # -1: none
    forced_eos_at: torch.Tensor  # position of the last allowed token, -1: none
    begin: torch.Tensor  # position at which begin_suppress_tokens are barred, -1: none
    remove_invalid: torch.Tensor  # 0 or 1
    renormalize: torch.Tensor  # 0 or 1
    prompt_length: torch.Tensor  # of slots that are not neutral: tokens from here on were generated
    lines: dict[str, torch.Tensor]
    lists: dict[str, torch.Tensor]


_NEVER = 1 << 62
# The columns of `EditTable` by what a request's edits say, and for numbers by the lengths of its prompt and of the
# whole sequence, for lists by the EOS ids that the length penalty favours.
FLOATS: dict[str, Callable[[Edits], float]] = {
    "repetition_penalty": lambda edits: edits.repetition_penalty,
    "typical_p": lambda edits: edits.typical_p,
    "epsilon_cutoff": lambda edits: _fraction(edits.epsilon_cutoff),
    "eta_cutoff": lambda edits: _fraction(edits.eta_cutoff),
    "presence_penalty": lambda edits: edits.presence_penalty,
    "frequency_penalty": lambda edits: edits.frequency_penalty,
}
NUMBERS: dict[str, Callable[[Edits, int, int], int]] = {
    "decay_start": lambda edits, prompt, _: _NEVER if edits.decay_start is None else prompt + edits.decay_start,
    "no_repeat_ngram_size": lambda edits, *_: edits.no_repeat_ngram_size,
    "forced_bos": lambda edits, *_: -1 if edits.forced_bos_token_id is None else edits.forced_bos_token_id,
    "forced_eos_at": lambda edits, _, most: most - 1 if edits.forced_eos_token_ids else -1,
    "begin": lambda edits, prompt, _: _begin(edits, prompt) if edits.begin_suppress_tokens else -1,
    "remove_invalid": lambda edits, *_: edits.remove_invalid_values,
    "renormalize": lambda edits, *_: edits.renormalize_logits,
    "prompt_length": lambda edits, prompt, _: prompt,
}
LISTS: dict[str, Callable[[Edits, tuple[int, ...]], np.ndarray]] = {
    "sequence_bias": lambda edits, _: encode_rules(edits.sequence_bias),
    "bad_words": lambda edits, _: encode_bars(edits.bad_words_ids),
    "also_seen": lambda edits, _: encode_tokens(edits.also_seen if edits.repetition_penalty != 1.0 else ()),
    "forced_eos": lambda edits, _: encode_tokens(edits.forced_eos_token_ids),
    # Once each: an id given twice is penalised once.
    "decay_eos": lambda edits, eos: encode_tokens(() if edits.decay_start is None else tuple(dict.fromkeys(eos))),
    "suppress": lambda edits, _: encode_tokens(edits.suppress_tokens),
    "begin_suppress": lambda edits, _: encode_tokens(edits.begin_suppress_tokens),
}


def _fraction(cutoff: float) -> float:
    return cutoff if 0.0 < cutoff < 1.0 else 0.0


def _begin(edits: Edits, prompt_length: int) -> int:
    return prompt_length + (prompt_length == 1 and edits.forced_bos_token_id is not None)


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
    assign(scores, sampling.eos[slots], -torch.inf, position < sampling.int_settings(slots).min_length)
    if features & {"forced_bos", "forced_eos"}:
        force(scores, table, slots, position)
    if "remove_invalid" in features:
        scores = remove_invalid(scores, table, slots)
    if "decay" in features:
        favour_eos(scores, table, slots, position)
    if "suppress" in features:
        assign(scores, tokens_of(table, "suppress", slots), -torch.inf)
    if "begin_suppress" in features:
        assign(scores, tokens_of(table, "begin_suppress", slots), -torch.inf, position == table.begin[slots])
    return scores


def tokens_of(table: EditTable, name: str, slots: torch.Tensor) -> torch.Tensor:
    """Return the slots' lists of tokens [R, N] int64, padded with -1."""
    lines = table.lists[name][table.lines[name][slots]].long()
    count, tokens = lines[:, :1], lines[:, 1:]
    return tokens.where(torch.arange(tokens.shape[1], device=tokens.device) < count, -1)


def assign(scores: torch.Tensor, tokens: torch.Tensor, value: float, active: torch.Tensor | None = None) -> None:
    """Set ``tokens`` [R, N] of the ``active`` rows [R] to a value; ignores ids outside the vocabulary."""
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
        assign(scores[row : row + 1], windows[repeated, -1][None], -torch.inf)


def force(scores: torch.Tensor, table: EditTable, slots: torch.Tensor, position: torch.Tensor) -> None:
    """Set forced tokens to 0 and all others to -inf, at position 1 and at the last allowed position."""
    bos = table.forced_bos[slots]
    at_begin, at_end = (position == 1) & (bos >= 0), position == table.forced_eos_at[slots]
    scores.masked_fill_((at_begin | at_end)[:, None], -torch.inf)
    assign(scores, bos[:, None], 0.0, at_begin & ~at_end)
    assign(scores, tokens_of(table, "forced_eos", slots), 0.0, at_end)


def remove_invalid(scores: torch.Tensor, table: EditTable, slots: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0, and infinities by the largest and the smallest finite number."""
    return torch.where((table.remove_invalid[slots] > 0)[:, None], scores.nan_to_num(), scores)


def decay_strength(table: EditTable, slots: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Float32 [R]: what the length penalty multiplies |score| by; of rows that are not decayed yet, 0."""
    over = (position - table.decay_start[slots]).clamp(min=0)
    # In float64, as the Python numbers of stock, and rounded once.
    return (table.decay_factor[slots].pow(over) - 1.0).float()


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


def settle_extremes(scores: torch.Tensor, rows: SamplingRows) -> None:
    """Adjust sampled rows whose best score is the largest or smallest finite number, made by `remove_invalid`.

    Stock adds no noise to such scores: ties are equally likely, so the row is shifted to a best score of 0. If the
    temperature would make the score infinite, stock raises, and a NaN marks the row as invalid.
    """
    top, largest = scores.amax(dim=-1), torch.finfo(torch.float32).max
    extreme = rows.drawn & (top.abs() == largest)
    scores.sub_(top.where(extreme, 0.0)[:, None])
    trips = extreme & (top / rows.temperature).isinf()
    scores[:, 0] = scores[:, 0].where(~trips, torch.nan)


def renormalize_greedy(scores: torch.Tensor, rows: SamplingRows, wanted: torch.Tensor) -> torch.Tensor:
    """Apply log-softmax to the greedy rows among ``wanted`` [R], whose rounding makes ties; sampling is unaffected."""
    return torch.where(((wanted > 0) & ~rows.drawn)[:, None], scores.log_softmax(dim=-1), scores)


def warpers_of(
    rows: SamplingRows, table: EditTable, slots: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the arguments of `cut_off` besides the scores, and bool [R]: the rows that it changes."""
    typical_p, epsilon, eta = filters = table.typical_p[slots], table.epsilon_cutoff[slots], table.eta_cutoff[slots]
    return filters, rows.drawn & ((typical_p < 1.0) | (epsilon > 0.0) | (eta > 0.0))


def draw_warped(
    scores: torch.Tensor, rows: SamplingRows, table: EditTable, slots: torch.Tensor, tokens: torch.Tensor,
    logprob: torch.Tensor | None,
) -> None:
    """Sample rows with typical, epsilon or eta filters again, into ``tokens`` [R] and ``logprob``; -1 stays."""
    filters, wanted = warpers_of(rows, table, slots)
    wanted &= tokens >= 0
    rows = rows._replace(temperature=rows.temperature.where(rows.drawn, 1.0))
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        part = rows.at(some)
        kept = cut_off(warped_scores(scores[some], part), *(column[some] for column in filters))
        noise = exponential_noise(part.seed, part.position, scores.shape[1])
        drawn = (kept - noise.log_()).argmax(dim=-1)
        tokens[some] = drawn.where(wanted[some], tokens[some])
        if logprob is not None:
            known = kept.log_softmax(dim=-1).gather(1, drawn[:, None])[:, 0]
            logprob[some] = known.where(wanted[some], logprob[some])


def cut_off(
    scores: torch.Tensor, typical_p: torch.Tensor, epsilon_cutoff: torch.Tensor, eta_cutoff: torch.Tensor
) -> torch.Tensor:
    """Apply typical, epsilon and eta filters to ``scores`` [R, V]; settings [R], 1, 0 and 0 in rows without them."""
    normalized = scores.log_softmax(dim=-1)
    entropy = -(normalized * normalized.exp()).nansum(dim=-1, keepdim=True)
    surprise = (-normalized - entropy).abs()
    ascending, order = surprise.sort(dim=-1)
    mass = scores.gather(1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (mass < typical_p[:, None]).sum(dim=-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    beyond = ascending > ascending.gather(1, last)
    beyond[:, 0] = False
    beyond &= (typical_p < 1.0)[:, None]
    scores = scores.masked_fill(torch.zeros_like(beyond).scatter_(1, order, beyond), -torch.inf)

    scores = _drop_below(scores, epsilon_cutoff)
    normalized = scores - scores.logsumexp(dim=-1, keepdim=True)
    least = torch.finfo(scores.dtype).min
    entropy = -(normalized.clamp(min=least) * normalized.softmax(dim=-1)).sum(dim=-1)
    return _drop_below(scores, torch.minimum(eta_cutoff, eta_cutoff.sqrt() * torch.exp(-entropy)))


def _drop_below(scores: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """Set less probable tokens to -inf, except the best."""
    unlikely = scores.softmax(dim=-1) < probability[:, None]
    return scores.masked_fill(unlikely & (scores < scores.amax(dim=-1, keepdim=True)), -torch.inf)
