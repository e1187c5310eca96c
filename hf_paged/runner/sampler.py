"""From logits to tokens: greedy, or temperature, top-k, top-p and min-p in stock generate's order, then Gumbel-max.

Random numbers come from (seed of the request, position of the token), hashed: a request draws the same numbers
whatever else is in the batch, and again after it was preempted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.sample_tokens import exponential_noise


class SamplingRows(NamedTuple):
    """Settings of R rows, all tensors [R] on the logits' device but for the host's hints of what is needed at all."""

    do_sample: torch.Tensor  # bool
    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64, 0: off
    tail: torch.Tensor  # float32, 1 - top_p rounded once, as transformers compares it; 0: off
    min_p: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64, index of the sampled token in its sequence
    min_length: torch.Tensor  # int64, EOS is barred while position < min_length
    eos: torch.Tensor  # [R, E] int64, padded with -1
    any_sample: bool
    max_top_k: int  # 0: no row has top_k
    any_top_p: bool
    any_min_p: bool
    any_min_length: bool


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row of ``logits`` [R, V]; int64 [R], or -1 where the row holds no valid distribution.

    Invalid is what stock's `argmax` or `multinomial` would trip over: NaN anywhere; when sampling, also +inf or
    nothing above -inf. Greedy ties go to the lowest index.
    """
    scores = logits.float()
    if rows.any_min_length:
        scores = _bar_eos(scores, rows)
    top = scores.amax(dim=-1)
    tokens = scores.argmax(dim=-1)
    invalid = top.isnan()
    if rows.any_sample:
        tokens = torch.where(rows.do_sample, _sample(scores, rows), tokens)
        invalid |= rows.do_sample & top.isinf()
    return tokens.masked_fill_(invalid, -1)


def processed_scores(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p over float32 ``scores`` [R, V], as transformers' warpers in their order."""
    scores = scores / rows.temperature[:, None]
    if rows.max_top_k:
        k = min(rows.max_top_k, scores.shape[-1])
        best = scores.topk(k, dim=-1).values
        kth = best.gather(1, (rows.top_k.clamp(1, k) - 1)[:, None])
        scores = scores.masked_fill((scores < kth) & (rows.top_k > 0)[:, None], -torch.inf)
    if rows.any_top_p:
        ascending, order = scores.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= rows.tail[:, None]
        tail &= (rows.tail > 0.0)[:, None]
        tail[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(tail).scatter_(1, order, tail), -torch.inf)
    if rows.any_min_p:
        probs = scores.softmax(dim=-1)
        floor = rows.min_p[:, None] * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < floor, -torch.inf)
    return scores


def _bar_eos(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    barred = (rows.position < rows.min_length)[:, None] & (rows.eos >= 0)
    column = rows.eos.clamp(min=0)
    # Padding columns all point at token 0: amin keeps a real bar on token 0 and leaves others as they are.
    value = torch.where(barred, -torch.inf, scores.gather(1, column))
    return scores.scatter_reduce(1, column, value, reduce="amin", include_self=True)


def _sample(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    # Gumbel-max (Gumbel 1954; Maddison et al. 2014): argmax(log p + g) draws from p, with g = -log(Exponential(1)).
    noise = exponential_noise(rows.seed, rows.position, scores.shape[-1])
    return (processed_scores(scores, rows) - noise.log_()).argmax(dim=-1)


def derive_seed(seed: int, index: int) -> int:
    """The 63-bit seed of the ``index``-th request of a call with base ``seed`` (splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
