"""The sampler: transformers' distributions, and random numbers that depend on seed and position alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_paged.sampling import gumbel
from hf_paged.sampling import sample_tokens as kernels
from hf_paged.sampling.gumbel import exponential_noise
from hf_paged.sampling.sampler import SamplingRows, derive_seed, log_probs_reference, processed_scores, sample
from hf_paged.sampling.sampler import sample_reference as draw
from hf_paged.sampling.table import SamplingTable

NEUTRAL = {
    "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0,
    "min_length": 0, "eos": (),
}


def make_rows(*rows: dict) -> SamplingRows:
    rows = [NEUTRAL | row for row in rows]
    column = {key: [row[key] for row in rows] for key in NEUTRAL}
    widest = max(1, *(len(eos) for eos in column["eos"]))
    return SamplingRows(
        temperature=torch.tensor(
            [t * d for t, d in zip(column["temperature"], column["do_sample"], strict=True)], dtype=torch.float32
        ),
        top_k=torch.tensor(column["top_k"]),
        one_minus_top_p=torch.tensor([1.0 - p for p in column["top_p"]], dtype=torch.float32),
        min_p=torch.tensor(column["min_p"], dtype=torch.float32),
        seed=torch.tensor(column["seed"]),
        position=torch.tensor(column["position"]),
        min_length=torch.tensor(column["min_length"]),
        eos=torch.tensor([list(eos) + [-1] * (widest - len(eos)) for eos in column["eos"]]),
    )


def warped(scores: torch.Tensor, row: dict) -> torch.Tensor:
    """One row through transformers' own warpers, as stock generate lists them."""
    row = NEUTRAL | row
    warpers = LogitsProcessorList()
    if row["temperature"] != 1.0:
        warpers.append(TemperatureLogitsWarper(row["temperature"]))
    if row["top_k"]:
        warpers.append(TopKLogitsWarper(row["top_k"]))
    if row["top_p"] < 1.0:
        warpers.append(TopPLogitsWarper(row["top_p"]))
    if row["min_p"]:
        warpers.append(MinPLogitsWarper(row["min_p"]))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), scores[None].clone())[0]


def assert_as_transformers(scores: torch.Tensor, settings: list[dict]) -> None:
    actual = processed_scores(scores.clone(), make_rows(*settings))
    for row, setting in enumerate(settings):
        expected = warped(scores[row], setting)
        assert torch.equal(actual[row].isinf(), expected.isinf()), setting
        torch.testing.assert_close(actual[row].softmax(-1), expected.softmax(-1), rtol=1e-6, atol=1e-9)


row_settings = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.5, 10.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    "top_p": st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
})


@given(st.lists(row_settings, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([3, 17, 300]))
def test_mixed_rows_have_transformers_probabilities(settings, seed, vocab_size):
    scores = torch.randn(len(settings), vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    assert_as_transformers(scores, settings)


@given(st.lists(row_settings, min_size=1, max_size=4), st.integers(0, 2**31))
def test_ties_at_the_cut_are_kept_or_dropped_as_in_transformers(settings, seed):
    scores = torch.randint(-3, 3, (len(settings), 40), generator=torch.Generator().manual_seed(seed)).float()
    assert_as_transformers(scores, [s | {"top_p": 1.0} for s in settings])


@pytest.mark.each_value
@pytest.mark.parametrize("vocab_size", [4, 5, 8, 10, 16, 20])
@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9])
def test_as_many_of_equal_tokens_stay_within_top_p_as_in_transformers(vocab_size, top_p):
    actual = processed_scores(torch.zeros(1, vocab_size), make_rows({"top_p": top_p}))
    expected = warped(torch.zeros(vocab_size), {"top_p": top_p})
    assert actual.isfinite().sum() == expected.isfinite().sum()


def test_rows_that_leave_an_option_off_are_not_touched_by_rows_that_use_it():
    scores = torch.randn(2, 50)
    both = processed_scores(scores.clone(), make_rows({}, {"temperature": 0.5, "top_k": 3, "top_p": 0.3, "min_p": 0.2}))
    assert torch.equal(both[0], scores[0])
    assert both[1].isfinite().sum() <= 3


def test_barred_tokens_stay_barred():
    scores = torch.randn(1, 20)
    scores[0, 5:] = -torch.inf
    assert_as_transformers(scores, [{"temperature": 0.5, "top_k": 10, "top_p": 0.9, "min_p": 0.01}])


# -- the choice ------------------------------------------


def test_greedy_takes_the_first_of_equal_maxima():
    scores = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(scores, make_rows({"do_sample": False}, {"do_sample": False})).tolist() == [1, 0]


def test_greedy_rows_beside_sampled_ones_stay_greedy():
    scores = torch.randn(40, 30)
    rows = make_rows(*({"do_sample": i % 2 == 1, "seed": i, "temperature": 9.0} for i in range(40)))
    tokens = draw(scores, rows)
    assert torch.equal(tokens[::2], scores[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], scores[1::2].argmax(-1))


def test_logits_are_read_in_fp32_and_not_changed():
    scores = torch.randn(3, 30).bfloat16()
    before = scores.clone()
    tokens = draw(scores, make_rows({"do_sample": False}, {"min_length": 5, "eos": (3,)}, {"top_k": 1}))
    assert torch.equal(scores, before)
    assert tokens.dtype is torch.int64
    assert tokens[0] == scores[0].float().argmax()


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_without_a_valid_distribution_are_reported_and_leave_others_alone(bad, do_sample):
    scores = torch.randn(3, 30)
    if bad == "nan":
        scores[1, 7] = torch.nan
    elif bad == "inf":
        scores[1, 7] = torch.inf
    else:
        scores[1] = -torch.inf
    rows = make_rows(*({"do_sample": do_sample, "seed": i, "top_p": 0.9, "top_k": 5} for i in range(3)))
    tokens = draw(scores, rows).tolist()
    stock_trips = bad == "nan" or do_sample
    assert tokens[1] == (-1 if stock_trips else int(scores[1].argmax()))
    assert tokens[0] >= 0
    assert tokens[2] >= 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_eos_is_barred_below_the_minimum_length(do_sample):
    scores = torch.zeros(4, 8)
    scores[:, 3], scores[:, 0] = 50.0, 40.0
    common = {"do_sample": do_sample, "eos": (3, 0), "min_length": 10}
    rows = make_rows(common | {"position": 9}, common | {"position": 10}, common | {"position": 2, "eos": (3,)},
                     common | {"eos": ()})
    first, second, third, fourth = draw(scores, rows).tolist()
    assert first not in (0, 3)
    assert (second, third, fourth) == (3, 0, 3)


def test_eos_comes_out_of_the_range_of_top_k_too():
    """Barred before the warpers, as in stock: top_k=1 then takes the next best."""
    scores = torch.tensor([[1.0, 2.0, 9.0]])
    assert draw(scores, make_rows({"top_k": 1, "eos": (2,), "min_length": 5})).tolist() == [1]


def test_a_step_reads_its_slots_and_writes_the_history():
    table = SamplingTable(
        floats=torch.tensor([[torch.nan] * 3, [0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [1.0, 0.5, 0.0]]),
        ints=torch.tensor([[-1, -1, -1], [5, 3, 9], [6, 0, 0], [7, 0, 0]]),
        eos=torch.tensor([[0, 1], [4, -1], [-1, -1], [-1, -1]]),
    )
    logits = torch.randn(3, 30)
    logits[1, 4], logits[0, 2] = 50.0, torch.nan
    slots, positions = torch.tensor([3, 1, 2]), torch.tensor([0, 8, 5], dtype=torch.int32)
    history = torch.full((4, 10), 77, dtype=torch.int32)
    tokens = sample(logits, table, slots, positions, history)
    assert tokens[0] == -1
    assert tokens[1] == logits[1].index_fill(0, torch.tensor([4]), -torch.inf).argmax()
    rows = make_rows({"seed": 6, "position": 5})
    assert tokens[2] == draw(logits[2:], rows)
    expected = torch.full_like(history, 77)
    expected[slots, positions] = tokens.clamp(min=0).int()
    assert torch.equal(history, expected)


def test_log_probs_are_of_what_is_left_after_the_warpers():
    scores = torch.randn(6, 40)
    settings = [{"do_sample": False, "top_k": 2}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}]
    settings += [{}]
    rows = make_rows(*settings)
    tokens = draw(scores, rows)
    known = log_probs_reference(scores, rows, tokens)
    for row, setting in enumerate(settings):
        expected = warped(scores[row], setting if setting.get("do_sample", True) else {}).log_softmax(-1)[tokens[row]]
        torch.testing.assert_close(known[row], expected)
    assert log_probs_reference(scores, rows, torch.full((6,), -1)).isnan().all()


# -- random numbers ------------------------------------------


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected)[probabilities > 0].sum())


@pytest.mark.each_value
@pytest.mark.parametrize("setting", [
    {}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_sampled_tokens_follow_the_probabilities(monkeypatch, setting, vary):
    monkeypatch.setattr(kernels, "GROUP_SIZE", 5)  # three groups, the last not full
    draws, scores = 20_000, torch.linspace(-1.5, 1.5, 12).roll(5)
    probabilities = warped(scores, setting).softmax(-1)
    rows = make_rows(NEUTRAL | setting)
    numbers = torch.tensor([derive_seed(1, i) for i in range(draws)]) if vary == "seed" else torch.arange(draws)
    rows = rows._replace(**{
        name: numbers if name == vary else getattr(rows, name).expand(draws, *getattr(rows, name).shape[1:])
        for name in ("temperature", "top_k", "one_minus_top_p", "min_p", "seed", "position", "min_length", "eos")
    })
    counts = draw(scores.expand(draws, -1), rows).bincount(minlength=12)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 37.4  # 1 in 10,000 with 11 degrees of freedom


def test_noise_is_exponential():
    seeds = torch.tensor([derive_seed(3, i) for i in range(200)])
    noise = exponential_noise(seeds, torch.arange(200), 5000).flatten().double()
    uniform = (1 - torch.exp(-noise)).sort().values
    assert noise.min() > 0
    assert noise.isfinite().all()
    steps = torch.arange(1, len(uniform) + 1).double() / len(uniform)
    assert (uniform - steps).abs().max() < 1.95 / len(uniform) ** 0.5  # Kolmogorov-Smirnov, 1 in 1,000


@pytest.mark.parametrize("pair", [
    ({"seed": 1}, {"seed": 2}), ({"seed": 1}, {"seed": 1 << 32}), ({"seed": 1}, {"seed": 1 + (1 << 32)}),
    ({"seed": 0}, {"seed": 2**63 - 1}), ({"position": 0}, {"position": 1}), ({"position": 5}, {"position": 5 + 2**16}),
    ({"seed": 1, "position": 2}, {"seed": 2, "position": 1}), ({"seed": 7, "position": 8}, {"seed": 8, "position": 7}),
    ({"seed": 3 + (4 << 32)}, {"seed": 4 + (3 << 32)}),
])
def test_noise_of_different_seeds_and_positions_is_uncorrelated(pair):
    a, b = (
        exponential_noise(torch.tensor([p.get("seed", 0)]), torch.tensor([p.get("position", 0)]), 100_000)[0]
        for p in pair
    )
    for shift in (0, 1, 2, 64):
        correlation = torch.corrcoef(torch.stack([a, b.roll(shift)]))[0, 1]
        assert abs(correlation) < 4.5 / 100_000**0.5


def test_noise_of_neighbouring_tokens_is_uncorrelated():
    noise = exponential_noise(torch.tensor([11]), torch.tensor([4]), 100_000)[0]
    for shift in (1, 2, 3, 16, 256):
        assert abs(torch.corrcoef(torch.stack([noise, noise.roll(shift)]))[0, 1]) < 4.5 / 100_000**0.5


def test_noise_along_the_positions_of_one_token_is_uncorrelated():
    noise = exponential_noise(torch.full((50_000,), 5), torch.arange(50_000), 2)
    for shift in (1, 2, 16):
        assert abs(torch.corrcoef(torch.stack([noise[:, 0], noise[:, 0].roll(shift)]))[0, 1]) < 4.5 / 50_000**0.5
    assert abs(torch.corrcoef(noise.T)[0, 1]) < 4.5 / 50_000**0.5


def test_noise_depends_on_nothing_but_seed_position_and_token():
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    together = exponential_noise(seeds, positions, 100)
    assert torch.equal(together[1], exponential_noise(seeds[1:2], positions[1:2], 1000)[0, :100])
    assert torch.equal(together.flip(0), exponential_noise(seeds.flip(0), positions.flip(0), 100))


@pytest.mark.parametrize("bits", [0, 1, 0xFFFFFF7F, 0xFFFFFFFF])
def test_extreme_bits_give_finite_positive_noise(monkeypatch, bits):
    """Rounded up to 1, a uniform number would make the noise infinite, and the only allowed token impossible."""
    monkeypatch.setattr(gumbel, "_mix", lambda x: torch.full_like(x, bits))
    noise = exponential_noise(torch.tensor([1]), torch.tensor([1]), 4)
    assert (noise == noise[0, 0]).all()
    assert noise.isfinite().all()
    assert (noise > 0).all()
    scores = torch.tensor([[0.0, 1.0, 9.0, 2.0]])
    assert draw(scores, make_rows({"top_k": 1})).tolist() == [2]


def test_derived_seeds_differ_and_fit():
    seeds = [derive_seed(base, index) for base in (0, 1, 2, 2**63 - 1) for index in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
