"""Rows for the sampling kernels, and what it means to draw the reference's tokens."""

from __future__ import annotations

import itertools

import torch

from hf_paged.sampling import sample_tokens as module
from hf_paged.sampling.gumbel import GROUP_STREAM, exponential_noise
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import SamplingRows, log_probs_reference, processed_scores, sample_reference
from hf_paged.sampling.table import SamplingTable

NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_length": 0, "eos": ()}


def make_logits(seed, rows, vocab_size, dtype, device, scale=3.0):
    """Rows that lie a stride apart in a tensor that is NaN elsewhere."""
    wide = torch.full((rows, vocab_size + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return wide.to(dtype).to(device)[:, 8:-16]


class Rows:
    """Settings of R rows in shuffled slots of a table; its first line belongs to none of them and is NaN."""

    def __init__(self, settings, device, seed=0, positions=None, seeds=None):
        g = torch.Generator().manual_seed(seed)
        count = len(settings)
        settings = [NEUTRAL | row for row in settings]
        width = max(1, *(len(row["eos"]) for row in settings)) if settings else 1
        self.slots = (torch.randperm(count, generator=g) + 1).to(device)
        if positions is None:
            positions = torch.randint(0, 40_000, (count,), generator=g)
        self.positions = positions.to(device)
        if seeds is None:
            seeds = torch.randint(0, 2**63 - 1, (count,), generator=g)
        floats = torch.full((count + 1, 3), torch.nan, device=device)
        ints = torch.full((count + 1, 3), -5, dtype=torch.int64, device=device)
        eos = torch.zeros(count + 1, width, dtype=torch.int64, device=device)
        floats[self.slots] = torch.tensor(
            [(row["temperature"], 1.0 - row["top_p"], row["min_p"]) for row in settings], dtype=torch.float32
        ).view(-1, 3).to(device)
        others = torch.tensor([(row["top_k"], row["min_length"]) for row in settings]).view(-1, 2)
        ints[self.slots] = torch.cat([seeds.cpu().view(-1, 1), others.long()], 1).to(device)
        eos[self.slots] = torch.tensor(
            [list(row["eos"]) + [-1] * (width - len(row["eos"])) for row in settings]
        ).view(-1, width).long().to(device)
        self.table = SamplingTable(floats, ints, eos)

    def reference_rows(self):
        return SamplingRows.of(self.table, self.slots, self.positions)

    def sample(self, logits, **options):
        return sample_tokens(logits, self.table, self.slots, self.positions, **options)

    def reference(self, logits):
        return sample_reference(logits, self.reference_rows())


def plain_rows(temperatures, device, **options):
    return Rows([{"temperature": float(t)} for t in temperatures], device, **options)


def shortfall(logits, rows, tokens):
    """How far each token's perturbed score is from the best, [R]; infinite where it is not allowed."""
    index = torch.arange(len(tokens), device=tokens.device)
    token = tokens.clamp(min=0)
    temperature = rows.temperature.where(rows.drawn, 1.0)
    scores = logits.float()
    flat = processed_scores(scores, rows._replace(temperature=temperature))
    flat = flat - exponential_noise(rows.seed, rows.position, flat.shape[1]).log()
    flat_gap = flat.amax(1) - flat[index, token]

    size = module.GROUP_SIZE
    scores = scores / temperature[:, None]
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    groups = padded.view(len(scores), -1, size).logsumexp(2)
    groups = groups - exponential_noise(rows.seed, rows.position, groups.shape[1], GROUP_STREAM).log()
    inner = scores - exponential_noise(rows.seed, rows.position, scores.shape[1]).log()
    inner = torch.nn.functional.pad(inner, (0, -inner.shape[1] % size), value=-torch.inf).view(len(scores), -1, size)
    group = token // size
    group_gap = groups.amax(1) - groups[index, group]
    gap = torch.maximum(group_gap, inner[index, group].amax(1) - inner[index, group, token % size])
    return flat_gap.where(rows.filtered, gap)


def assert_as_reference(tokens, logits, rows, logprob=None):
    """Greedy rows to the token; a sampled one that is not the reference's scores within 1e-4 of it. Log-probs to 1e-4.

    top_p and min_p may come out as if they were 2e-6 smaller or larger: masses are summed in another order.
    """
    expected_rows = rows.reference_rows()
    expected = sample_reference(logits, expected_rows)
    assert tokens.dtype is torch.int64
    assert tokens.shape == expected.shape
    assert torch.equal(tokens < 0, expected < 0)
    good = torch.zeros_like(tokens, dtype=torch.bool)
    for by_p, by_min in itertools.product((0.0, -2e-6, 2e-6), repeat=2):
        mass = expected_rows.one_minus_top_p
        moved = expected_rows._replace(
            one_minus_top_p=(mass + by_p).clamp(min=1e-12).where(mass > 0, 0.0),
            min_p=(expected_rows.min_p * (1 + by_min)).clamp(max=1.0),
        )
        reference = expected if by_p == by_min == 0.0 else sample_reference(logits, moved)
        fine = tokens == reference
        different = (~fine & moved.drawn & (tokens >= 0)).nonzero().flatten()
        if len(different):
            fine[different] = shortfall(logits[different], moved.at(different), tokens[different]) <= 1e-4
        if logprob is not None:
            known = log_probs_reference(logits, moved, tokens)
            fine &= torch.isclose(logprob, known, rtol=1e-5, atol=1e-4, equal_nan=True)
        good |= fine
        if good.all():
            return
    bad = int((~good).nonzero()[0])
    raise AssertionError(
        f"row {bad}: token {int(tokens[bad])}, reference {int(expected[bad])}, log-prob "
        f"{None if logprob is None else float(logprob[bad])}, reference "
        f"{float(log_probs_reference(logits, expected_rows, tokens)[bad])}, {expected_rows.at(bad)}"
    )
