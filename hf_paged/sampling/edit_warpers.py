"""Sampling steps without kernels: typical, epsilon and eta filters, renormalisation, scores at the limits of fp32.

In torch, without host sync on CUDA. Filters have transformers' order and roundings.
"""

from __future__ import annotations

import torch

from hf_paged.sampling.edit_reference import EditTable
from hf_paged.sampling.gumbel import exponential_noise
from hf_paged.sampling.sampler import SamplingRows, warped_scores

WARPERS = frozenset({"typical", "epsilon", "eta"})
# Sorting a row of 150,000 tokens takes some 10 MB.
_ROWS_AT_ONCE = 64


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


def draw_warped(
    scores: torch.Tensor, rows: SamplingRows, table: EditTable, slots: torch.Tensor, tokens: torch.Tensor,
    logprob: torch.Tensor | None,
) -> None:
    """Sample rows with typical, epsilon or eta filters again, into ``tokens`` [R] and ``logprob``; -1 stays."""
    filters = torch.stack([table.typical_p[slots], table.epsilon_cutoff[slots], table.eta_cutoff[slots]])
    wanted = rows.drawn & ((filters[0] < 1.0) | (filters[1] > 0.0) | (filters[2] > 0.0)) & (tokens >= 0)
    rows = rows._replace(temperature=rows.temperature.where(rows.drawn, 1.0))
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        part = SamplingRows(*(column[some] for column in rows))
        kept = cut_off(warped_scores(scores[some], part), *filters[:, some])
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
