"""sample_tokens without filters: the reference's tokens, whatever the grid; what it writes beside them."""

import pytest
import torch
from pairs import every_pair
from sampling_cases import Rows, assert_as_reference, make_logits, plain_rows

from hf_paged.sampling import sample_tokens as module
from hf_paged.sampling.sample_tokens import sample_tokens

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = [
    pytest.param(Rows.sample, "cpu", marks=pytest.mark.interpreted),
    pytest.param(Rows.sample, "cuda", marks=pytest.mark.gpu),
]
RUNS = [pytest.param(Rows.reference, "cpu"), *KERNELS]
# Thousands of draws: the interpreter makes them once, and is the reference's to the token in the tests above.
QUICK_RUNS = [run for run in RUNS if pytest.mark.interpreted not in run.marks]


@pytest.fixture
def small_groups(monkeypatch):
    """Many groups of a small vocabulary."""
    monkeypatch.setattr(module, "GROUP_SIZE", 64)
    monkeypatch.setattr(module, "_PIECE", 8)


def mixed_temperatures(rows):
    """Every third row is greedy."""
    return [0.0 if i % 3 == 0 and rows > 1 else 0.1 + 1.5 * (i * 0.37 % 1.0) for i in range(rows)]


@pytest.mark.parametrize(("run", "device", "dtype", "rows", "vocab_size"), every_pair(KERNELS, [
    pytest.param(dtype, *shape) for dtype, shape in zip(FLOATS * 2, [
        (1, 1), (13, 5), (1, 1000), (3, 1024), (1, 4999), (13, 2050),
    ], strict=True)
]))
def test_tokens_and_log_probs_are_the_references(run, device, dtype, vocab_size, rows):
    logits = make_logits(vocab_size + rows, rows, vocab_size, dtype, device)
    settings = plain_rows(mixed_temperatures(rows), device)
    logprob = torch.zeros(rows, device=device)
    tokens = run(settings, logits, logprob=logprob)
    assert_as_reference(tokens, logits, settings, logprob)
    assert torch.equal(run(settings, logits), tokens)


@pytest.mark.parametrize(("run", "device"), KERNELS)
@pytest.mark.parametrize("programs", [1, 12, 8192])
def test_any_grid_gives_the_same_tokens(run, device, monkeypatch, small_groups, programs):
    """A program for a group, for several, and for a whole row; every part holds some row's token."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    logits, settings = make_logits(7, 6, 500, torch.float16, device), plain_rows(mixed_temperatures(6), device)
    assert_as_reference(run(settings, logits), logits, settings)
    winners = torch.arange(6, device=device) * 80 + 10
    logits[torch.arange(6), winners] = 200.0
    assert torch.equal(run(settings, logits), winners)


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_greedy_takes_the_first_of_equal_maxima(run, device, dtype):
    g = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 3, (8, 5000), generator=g).to(dtype)
    logits[1] = 2.0
    logits[2] = -torch.inf
    logits[3, [4999, 77, 77 + 1024, 2100]] = torch.inf
    logits[4] = torch.tensor([0.0, -0.0]).to(dtype).repeat(2500)
    logits[5] = torch.finfo(dtype).min
    logits[6, :4998], logits[6, 4998:] = -torch.inf, -5.0
    tokens = run(plain_rows([0.0] * 8, device), logits.to(device))
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens.tolist() == expected
    assert expected[1:] == [0, 0, 77, 0, 0, 4998, expected[7]]


@pytest.mark.parametrize(("run", "device", "dtype", "column", "options"), every_pair(
    RUNS, FLOATS, [1023, 2999], [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}],
))
def test_rows_without_a_valid_distribution(run, device, dtype, column, options):
    bad, sampled = [torch.nan, torch.inf, -torch.inf], bool(options)
    logits = make_logits(2, 7, 3000, dtype, device)
    for row, value in zip((1, 3, 5), bad, strict=True):
        if value == -torch.inf:
            logits[row] = value
        else:
            logits[row, column] = value
    settings = Rows([options] * 7, device)
    tokens = run(settings, logits)
    assert tokens[[1, 3, 5]].tolist() == [-1, -1 if sampled else column, -1 if sampled else 0]
    assert (tokens[[0, 2, 4, 6]] >= 0).all()
    assert_as_reference(tokens, logits, settings)


@pytest.mark.parametrize(("run", "device"), KERNELS)
def test_log_prob_of_an_invalid_row_is_nan_and_its_stand_in_token_0(run, device):
    logits = make_logits(2, 5, 300, torch.float16, device)
    logits[1, 7], logits[3, 250], logits[4, 9] = torch.nan, torch.inf, torch.nan
    settings = plain_rows([0.0, 0.7, 0.7, 0.0, 0.0], device, positions=torch.tensor([0, 4, 9, 2, 2]))
    logprob = torch.zeros(5, device=device)
    history = torch.full((7, 10), 77, dtype=torch.int32, device=device)
    tokens = run(settings, logits, logprob=logprob, history=history)
    assert (tokens < 0).tolist() == [False, True, False, False, True]
    assert tokens[3] == 250  # +inf is no obstacle to greedy, but has no log-probability
    assert logprob.isnan().tolist() == [False, True, False, True, True]
    expected = torch.full_like(history, 77)
    expected[settings.slots, settings.positions] = tokens.clamp(min=0).int()
    assert torch.equal(history, expected)
    assert expected[settings.slots[1], 4] == 0


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_masked_tokens_are_never_drawn(run, device):
    logits = make_logits(3, 20, 2500, torch.float16, device)
    allowed = torch.tensor([3, 1500, 2499], device=device)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    masked[0], masked[0, 2047] = -torch.inf, -60_000.0
    tokens = run(plain_rows([0.01] * 20, device), masked)
    assert tokens[0] == 2047
    assert torch.isin(tokens[1:], allowed).all()
    hot = run(plain_rows([1e4] * 20, device), masked)
    assert torch.isin(hot[1:], allowed).all()
    assert len(hot[1:].unique()) == 3


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_scores_past_float32(run, device):
    """A division that overflows: the first of the infinite scores, as argmax over them."""
    logits = torch.full((2, 3000), -3e38, device=device)
    logits[0, [2900, 1700]] = torch.tensor([3e38, 2e38], device=device)
    assert run(plain_rows([1e-3] * 2, device), logits).tolist() == [1700, 0]


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_a_tiny_temperature_is_greedy(run, device):
    logits = make_logits(3, 4, 2500, torch.float16, device)
    assert torch.equal(run(plain_rows([1e-6, 1e-30, 1e-37, 1e-6], device), logits), logits.argmax(-1))


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_end_of_sequence_is_barred_below_the_minimum_length(run, device, temperature):
    logits = torch.full((5, 2100), -30.0, device=device)
    logits[:, 2080], logits[:, 0], logits[:, 9] = 50.0, 40.0, 20.0
    common = {"temperature": temperature, "eos": (2080, 0), "min_length": 10}
    settings = Rows([common, common, common | {"eos": (2080,)}, common | {"eos": ()}, common],
                    device, positions=torch.tensor([9, 10, 2, 2, 0], dtype=torch.int32))
    assert run(settings, logits).tolist() == [9, 2080, 0, 2080, 9]


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_a_row_does_not_see_its_batch(run, device):
    logits, count = make_logits(4, 9, 3000, torch.float16, device), 9
    seeds, positions = torch.arange(count) * 2**40, torch.arange(count) * 1000
    temperature = mixed_temperatures(count)
    together = run(plain_rows(temperature, device, seeds=seeds, positions=positions), logits)
    alone = [
        run(plain_rows([one], device, seeds=seeds[i : i + 1], positions=positions[i : i + 1]), logits[i : i + 1])
        for i, one in enumerate(temperature)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("run", "device", "vary"), [
    *every_pair(RUNS, ["seeds"]), *every_pair(QUICK_RUNS, ["positions"]),
])
def test_tokens_follow_the_probabilities(run, device, monkeypatch, vary):
    """Over several groups, of which the last is not full."""
    monkeypatch.setattr(module, "GROUP_SIZE", 4)
    monkeypatch.setattr(module, "_PIECE", 2)
    draws = 300 if (run, device) == (Rows.sample, "cpu") else 20_000
    scores = torch.linspace(-1.5, 1.5, 11, device=device).roll(5)
    counted, same = torch.arange(draws), torch.full((draws,), 9)
    numbers = {"seeds": same, "positions": same} | {vary: counted}
    tokens = run(plain_rows([0.8] * draws, device, **numbers), scores.expand(draws, -1))
    expected = (scores / 0.8).softmax(-1) * draws
    chi_square = ((tokens.bincount(minlength=11) - expected) ** 2 / expected).sum()
    assert chi_square < 35.6  # 1 in 10,000 with 10 degrees of freedom


@pytest.mark.parametrize(("run", "device"), QUICK_RUNS)
def test_group_and_token_are_independent(run, device, monkeypatch):
    """The place within the group tells nothing of which group it is."""
    monkeypatch.setattr(module, "GROUP_SIZE", 4)
    monkeypatch.setattr(module, "_PIECE", 2)
    draws = 20_000
    positions = torch.arange(draws) % 7
    tokens = run(plain_rows([1.0] * draws, device, positions=positions), torch.zeros(draws, 16, device=device))
    expected = draws / 16
    chi_square = ((tokens.bincount(minlength=16) - expected) ** 2 / expected).sum()
    assert chi_square < 44.3  # 1 in 10,000 with 15 degrees of freedom


# -- arguments and graphs ------------------------------------------


@pytest.mark.interpreted
def test_no_rows():
    assert Rows([], "cpu").sample(torch.zeros(0, 10)).shape == (0,)


def test_bad_arguments():
    settings = plain_rows([0.0] * 4, "cpu")
    logits, table, slots, positions = torch.zeros(4, 10), settings.table, settings.slots, settings.positions
    history = torch.zeros(5, 10, dtype=torch.int32)
    for arguments, options, message in [
        ((logits[0], table, slots, positions), {}, "R, V"),
        ((logits[:, :0], table, slots, positions), {}, "V > 0"),
        ((logits.long(), table, slots, positions), {}, "fp32"),
        ((logits.double(), table, slots, positions), {}, "fp32"),
        ((logits.t().contiguous().t(), table, slots, positions), {}, "last dim"),
        ((logits, table._replace(floats=table.floats.double()), slots, positions), {}, "floats"),
        ((logits, table._replace(ints=table.ints[:, :2]), slots, positions), {}, "ints"),
        ((logits, table._replace(eos=table.eos[1:]), slots, positions), {}, "eos"),
        ((logits, table, slots[1:], positions), {}, "slots"),
        ((logits, table, slots, positions.float()), {}, "position"),
        ((logits, table, slots, positions), {"history": history[1:]}, "history"),
        ((logits, table, slots, positions), {"history": history.long()}, "history"),
        ((logits, table, slots, positions), {"logprob": torch.zeros(4).double()}, "logprob"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample_tokens(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 33, 256])
def test_gpu_full_vocabulary(dtype, rows):
    logits, settings = make_logits(6, rows, 151_936, dtype, "cuda"), plain_rows(mixed_temperatures(rows), "cuda")
    logprob = torch.zeros(rows, device="cuda")
    assert_as_reference(settings.sample(logits, logprob=logprob), logits, settings, logprob)


@pytest.mark.gpu
def test_gpu_tokens_of_a_seed_are_the_cpus():
    logits = make_logits(8, 64, 20_000, torch.bfloat16, "cpu")
    tokens = plain_rows(mixed_temperatures(64), "cuda").sample(logits.cuda())
    assert_as_reference(tokens.cpu(), logits, plain_rows(mixed_temperatures(64), "cpu"))


@pytest.mark.gpu
def test_gpu_logits_past_two_billion_elements():
    vocab_size = 151_936
    rows = 2**31 // vocab_size + 20
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    target = torch.arange(rows, device="cuda") * 7919 % vocab_size
    logits[torch.arange(rows, device="cuda"), target] = 100.0
    options = [{}, {"temperature": 0.5}, {"temperature": 0.5, "top_k": 5}, {"temperature": 0.5, "top_p": 0.5}]
    assert torch.equal(Rows([options[i % 4] for i in range(rows)], "cuda").sample(logits), target)
