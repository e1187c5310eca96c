"""Sampling from logits: greedy, or temperature, top-k, top-p and min-p in stock generate's order, then Gumbel-max.

Random numbers are hashed from (seed of the request, position of the token): a request gets the same numbers whatever
else is in the batch, and again after a preemption. On CUDA the Triton kernels of `sample_tokens` run; the torch code
here is their reference, and runs on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.sampling import sample_tokens as kernels
from hf_paged.sampling.gumbel import GROUP_STREAM, exponential_noise, exponential_noise_at
from hf_paged.sampling.table import SamplingTable


def sample(
    logits: torch.Tensor, table: SamplingTable, slots: torch.Tensor, position: torch.Tensor,
    history: torch.Tensor, logprob: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample tokens int64 [R] of the rows at ``slots`` [R] for ``position`` [R], and write them to ``history``.

    Arguments and result as in `sample_tokens`.
    """
    if logits.is_cuda:
        return kernels.sample_tokens(logits, table, slots, position, history=history, logprob=logprob)
    rows = SamplingRows.of(table, slots, position)
    tokens = sample_reference(logits, rows)
    if logprob is not None:
        logprob.copy_(log_probs_reference(logits, rows, tokens))
    # An invalid row (-1) ends at commit, but an overlapping step needs a valid token id.
    history[slots, position] = tokens.clamp(min=0).to(torch.int32)
    return tokens


class SamplingRows(NamedTuple):
    """Settings of R rows, all tensors [R] on the logits' device."""

    temperature: torch.Tensor  # float32, 0 for greedy
    top_k: torch.Tensor  # int64, 0 for off
    one_minus_top_p: torch.Tensor  # float32, 1 - top_p rounded once, as transformers compares it; 0 for off
    min_p: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64, index of the sampled token in its sequence
    min_length: torch.Tensor  # int64, EOS is barred while position < min_length
    eos: torch.Tensor  # [R, E] int64, padded with -1

    @classmethod
    def of(cls, table: SamplingTable, slots: torch.Tensor, position: torch.Tensor) -> SamplingRows:
        temperature, one_minus_top_p, min_p = table.float_settings(slots)
        seed, top_k, min_length = table.int_settings(slots)
        return cls(temperature, top_k, one_minus_top_p, min_p, seed, position.long(), min_length, table.eos[slots])

    @property
    def drawn(self) -> torch.Tensor:
        """Return bool [R], False for greedy rows."""
        return self.temperature != 0.0

    @property
    def filtered(self) -> torch.Tensor:
        """Return bool [R], True for rows sampled with top-k, top-p or min-p."""
        return self.drawn & ((self.top_k > 0) | (self.one_minus_top_p > 0.0) | (self.min_p > 0.0))

    def at(self, index: torch.Tensor | slice) -> SamplingRows:
        return SamplingRows(*(column[index] for column in self))


def sample_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Sample one token per row of ``logits`` [R, V]; int64 [R], or -1 if the row has no valid distribution.

    A row is invalid if stock's `argmax` or `multinomial` would fail on it: with NaN anywhere; when sampling, also with
    +inf or without a score above -inf. Greedy ties go to the lowest index.
    """
    scores = bar_eos(logits.float(), rows)
    tokens = scores.argmax(dim=-1)
    top = scores.gather(1, tokens[:, None])[:, 0]  # argmax treats NaN as the largest
    if not rows.drawn.any():
        return tokens.masked_fill_(top.isnan(), -1)
    invalid = top.isnan() | (rows.drawn & top.isinf())
    # Gumbel-max (Gumbel 1954): argmax(log p + g) samples from p, with g = -log(Exponential(1)).
    filtered = rows.filtered.nonzero().flatten()
    if len(filtered):
        some = rows.at(filtered)
        noise = exponential_noise(some.seed, some.position, scores.shape[-1])
        tokens[filtered] = (processed_scores(scores[filtered], some) - noise.log_()).argmax(dim=-1)
    plain = (rows.drawn & ~rows.filtered).nonzero().flatten()
    if len(plain):
        some = rows.at(plain)
        scaled = scores[plain] / some.temperature[:, None]
        tokens[plain] = drawn_in_groups(scaled, some.seed, some.position)[1]
    return tokens.masked_fill_(invalid, -1)


def log_probs_reference(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities float32 [R] of ``tokens`` [R] under their sampling distribution; NaN for -1."""
    scores = bar_eos(logits.float(), rows)
    drawn = rows._replace(temperature=rows.temperature.where(rows.drawn, 1.0))
    filtered = rows.filtered[:, None]
    scores = processed_scores(scores, drawn).where(filtered, scores / drawn.temperature[:, None])
    known = scores.log_softmax(dim=-1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return known.masked_fill(tokens < 0, torch.nan)


def processed_scores(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p to float32 ``scores`` [R, V], in the order of transformers' warpers.

    Reads the settings on the host, to skip filters that no row uses.
    """
    scores = scores / rows.temperature[:, None]
    if (rows.top_k > 0).any():
        k = min(int(rows.top_k.max()), scores.shape[-1])
        best = scores.topk(k, dim=-1).values
        kth = best.gather(1, (rows.top_k.clamp(1, k) - 1)[:, None])
        scores = scores.masked_fill((scores < kth) & (rows.top_k > 0)[:, None], -torch.inf)
    if (rows.one_minus_top_p > 0.0).any():
        ascending, order = scores.sort(dim=-1, stable=True)  # of equal tokens the kernel drops the same ones
        scores = top_p_filtered(scores, ascending, order, rows)
    return min_p_filtered(scores, rows) if (rows.min_p > 0.0).any() else scores


def warped_scores(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`processed_scores` without a look at the settings from the host, which would wait for the device."""
    scores = scores / rows.temperature[:, None]
    ascending, order = scores.sort(dim=-1, stable=True)
    vocab_size = scores.shape[1]
    kth = ascending.gather(1, (vocab_size - rows.top_k.clamp(max=vocab_size)).clamp(max=vocab_size - 1)[:, None])
    kth = kth.where((rows.top_k > 0)[:, None], -torch.inf)
    scores = scores.masked_fill(scores < kth, -torch.inf)
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    return min_p_filtered(top_p_filtered(scores, ascending, order, rows), rows)


def top_p_filtered(
    scores: torch.Tensor, ascending: torch.Tensor, order: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    """Drop from ``scores`` [R, V] the least likely tokens of mass 1 - top_p; ``ascending``, ``order``: their sort."""
    tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= rows.one_minus_top_p[:, None]
    tail &= (rows.one_minus_top_p > 0.0)[:, None]
    tail[:, -1] = False
    return scores.masked_fill(torch.zeros_like(tail).scatter_(1, order, tail), -torch.inf)


def min_p_filtered(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Drop from ``scores`` [R, V] tokens less likely than min_p times the likeliest; 0 leaves a row unchanged."""
    probs = scores.softmax(dim=-1)
    floor = rows.min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probs < floor, -torch.inf)


def bar_eos(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Set EOS to -inf in rows below their minimum length."""
    barred = (rows.position < rows.min_length)[:, None] & (rows.eos >= 0)
    if not barred.any():
        return scores
    row, column = barred.nonzero(as_tuple=True)
    # Not by a minimum with -inf, which would keep NaN.
    return scores.index_put((row, rows.eos[row, column]), scores.new_tensor(-torch.inf))


def drawn_in_groups(
    scores: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply Gumbel-max to groups by their logsumexp, then to the tokens of the chosen group (see `sample_tokens`).

    Returns the best group's perturbed logsumexp [R], and the column of the sampled token [R]. Columns of ``scores``
    [R, n] are the tokens from ``first`` on, a multiple of the group size.
    """
    (rows, count), size = scores.shape, kernels.GROUP_SIZE
    num_groups = -(-count // size)
    padded = torch.nn.functional.pad(scores, (0, num_groups * size - count), value=-torch.inf)
    groups = padded.view(rows, num_groups, size)
    noise = exponential_noise(seed, position, num_groups, GROUP_STREAM + first // size)
    value, chosen = (groups.logsumexp(dim=-1) - noise.log_()).max(dim=-1)
    at = chosen[:, None] * size + torch.arange(size, device=scores.device)
    noise = exponential_noise_at(seed, position, at + first)
    best = (groups[torch.arange(rows, device=scores.device), chosen] - noise.log_()).argmax(dim=-1)
    return value, chosen * size + best


def derive_seed(seed: int, index: int) -> int:
    """Return the 63-bit seed of request ``index`` of a call with base ``seed`` (splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
