"""sample_tokens: the reference's tokens, from the reference's random bits, whatever the split of the vocabulary."""

import pytest
import torch

from hf_paged.kernels import sample_tokens as module
from hf_paged.kernels._triton import jit, tl, triton
from hf_paged.kernels.sample_tokens import (
    exponential_noise,
    sample_tokens,
    sample_tokens_reference,
    sample_tokens_triton,
    split_vocabulary,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RUNS = [
    pytest.param(sample_tokens_reference, "cpu"),
    pytest.param(sample_tokens_triton, "cpu", marks=pytest.mark.interpreted),
    pytest.param(sample_tokens, "cuda", marks=pytest.mark.gpu),
]
KERNELS = RUNS[1:]
_mix32, _row_keys, _token_bits, _exponential = (
    getattr(module, name) for name in ("_mix32", "_row_keys", "_token_bits", "_exponential")
)


def make(seed, rows, vocab_size, dtype, device, temperature=None):
    """Logits whose rows lie a stride apart in a tensor that is NaN elsewhere; every third row is greedy."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocab_size + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(rows, vocab_size, generator=g) * 3
    if temperature is None:
        temperature = torch.rand(rows, generator=g) * 1.5 + 0.1
        temperature[::3] = 0.0
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 40_000, (rows,), generator=g)
    logits = wide.to(dtype).to(device)[:, 8:-16]
    return logits, temperature.to(device), seeds.to(device), positions.to(device)


def assert_as_reference(tokens, logits, temperature, seed, position):
    """Greedy rows to the token; a sampled token that is not the reference's scores within 1e-4 of it."""
    expected = sample_tokens_reference(logits, temperature, seed, position)
    assert tokens.dtype is torch.int64
    assert tokens.shape == expected.shape
    different = (tokens != expected).nonzero().flatten()
    assert (temperature[different] > 0).all()
    assert (tokens[different] >= 0).all()
    if len(different):
        scores = logits.float() / temperature[:, None] - exponential_noise(seed, position, logits.shape[1]).log()
        mine, best = (scores.gather(1, t.clamp(min=0)[:, None])[different, 0] for t in (tokens, expected))
        assert (best - mine <= 1e-4).all()


@pytest.mark.parametrize(("run", "device"), KERNELS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (33, 5), (1, 1000), (3, 1024), (1, 4999), (33, 2050)])
def test_tokens_are_the_references(run, device, dtype, vocab_size, rows):
    temperature = torch.full((1,), 0.7) if rows == 1 else None
    arguments = make(vocab_size + rows, rows, vocab_size, dtype, device, temperature)
    assert_as_reference(run(*arguments), *arguments)


@pytest.mark.parametrize(("run", "device"), KERNELS)
@pytest.mark.parametrize("programs", [1, 12, 2048])
def test_any_split_gives_the_same_tokens(run, device, monkeypatch, programs):
    """Parts of one tile, of several, and a row in one part; every part holds some row's token."""
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    logits, temperature, seed, position = make(7, 6, 5000, torch.float16, device)
    assert_as_reference(run(logits, temperature, seed, position), logits, temperature, seed, position)
    winners = torch.arange(6, device=device) * 800 + 100
    logits[torch.arange(6), winners] = 200.0
    assert torch.equal(run(logits, temperature, seed, position), winners)


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 256, 1024, 5000])
@pytest.mark.parametrize("vocab_size", [1, 1023, 1025, 32_000, 151_936, 400_000])
def test_parts_cover_the_vocabulary(rows, vocab_size):
    parts, size = split_vocabulary(rows, vocab_size)
    assert 1 <= parts <= 256
    assert (parts - 1) * size < vocab_size <= parts * size
    assert rows == 1 or parts == 1 or rows * parts <= 2 * 2048


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("programs", [1, 16, 2048])
def test_greedy_takes_the_first_of_equal_maxima(run, device, monkeypatch, dtype, programs):
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    g = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 3, (8, 5000), generator=g).to(dtype)
    logits[1] = 2.0
    logits[2] = -torch.inf
    logits[3, [4999, 77, 77 + 1024, 2100]] = torch.inf
    logits[4] = torch.tensor([0.0, -0.0]).to(dtype).repeat(2500)
    logits[5] = torch.finfo(dtype).min
    logits[6, :4998], logits[6, 4998:] = -torch.inf, -5.0
    logits = logits.to(device)
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    tokens = run(logits, zeros.float(), zeros, zeros)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens.tolist() == expected
    assert expected[1:] == [0, 0, 77, 0, 0, 4998, expected[7]]


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("column", [1023, 2999])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_valid_distribution(run, device, dtype, column, temperature):
    bad, sampled = [torch.nan, torch.inf, -torch.inf], temperature > 0
    logits, _, seed, position = make(2, 7, 3000, dtype, device)
    for row, value in zip((1, 3, 5), bad, strict=True):
        if value == -torch.inf:
            logits[row] = value
        else:
            logits[row, column] = value
    heat = torch.full((7,), temperature, device=device)
    tokens = run(logits, heat, seed, position)
    assert tokens[[1, 3, 5]].tolist() == [-1, -1 if sampled else column, -1 if sampled else 0]
    assert (tokens[[0, 2, 4, 6]] >= 0).all()
    assert_as_reference(tokens, logits, heat, seed, position)


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_masked_tokens_are_never_drawn(run, device):
    logits, _, seed, position = make(3, 20, 2500, torch.float16, device)
    allowed = torch.tensor([3, 1500, 2499], device=device)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    masked[0], masked[0, 2047] = -torch.inf, -60_000.0
    tokens = run(masked, torch.full((20,), 0.01, device=device), seed, position)
    assert tokens[0] == 2047
    assert torch.isin(tokens[1:], allowed).all()
    hot = run(masked, torch.full((20,), 1e4, device=device), seed, position)
    assert torch.isin(hot[1:], allowed).all()
    assert len(hot[1:].unique()) == 3


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_scores_past_float32(run, device):
    """A division that overflows: the first of the infinite scores, as argmax over them."""
    logits = torch.full((2, 3000), -3e38, device=device)
    logits[0, [2900, 1700]] = torch.tensor([3e38, 2e38], device=device)
    ones = torch.ones(2, dtype=torch.int64, device=device)
    assert run(logits, torch.full((2,), 1e-3, device=device), ones, ones).tolist() == [1700, 0]


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_a_row_does_not_see_its_batch(run, device):
    logits, temperature, seed, position = make(4, 9, 3000, torch.float16, device)
    together = run(logits, temperature, seed, position)
    alone = [run(logits[i : i + 1], temperature[i : i + 1], seed[i : i + 1], position[i : i + 1]) for i in range(9)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_follow_the_probabilities(run, device, vary):
    draws = 200 if run is sample_tokens_triton else 20_000
    scores = torch.linspace(-1.5, 1.5, 12, device=device).roll(5)
    probabilities = (scores / 0.8).softmax(-1)
    counted, same = torch.arange(draws, device=device), torch.full((draws,), 9, device=device)
    seed, position = (counted, same) if vary == "seed" else (same, counted)
    tokens = run(scores.expand(draws, -1), torch.full((draws,), 0.8, device=device), seed, position)
    expected = probabilities * draws
    chi_square = ((tokens.bincount(minlength=12) - expected) ** 2 / expected).sum()
    assert chi_square < 37.4  # 1 in 10,000 with 11 degrees of freedom


# -- random numbers ------------------------------------------


@jit()
def _noise_kernel(seed, position, bits, noise, vocab_size, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    key0, key1 = _row_keys(tl.load(seed + row), tl.load(position + row))
    drawn = _token_bits(token, key0, key1)
    tl.store(bits + row * vocab_size + token, drawn.to(tl.int64), mask=token < vocab_size)
    tl.store(noise + row * vocab_size + token, _exponential(drawn, INTERPRETED), mask=token < vocab_size)


@jit()
def _noise_of_bits_kernel(bits, noise, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    lane = tl.arange(0, TILE)
    tl.store(noise + lane, _exponential(tl.load(bits + lane).to(tl.uint32), INTERPRETED))


DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SEEDS = [0, 1, 1 << 32, (1 << 32) + 1, 2**63 - 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1234567890123456789, -1, -(2**63)]


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_draws_the_references_bits(device, monkeypatch):
    seed = torch.tensor(SEEDS * 2, device=device)
    position = torch.tensor([0, 1, 5, 40_959, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2, 3, 4], device=device).repeat(2)
    position[11:] = position[11:].roll(3)
    vocab_size = 3000
    bits = torch.zeros(len(seed), vocab_size, dtype=torch.int64, device=device)
    noise = torch.zeros(len(seed), vocab_size, device=device)
    grid = (len(seed), triton.cdiv(vocab_size, 1024))
    interpreted = triton.knobs.runtime.interpret
    _noise_kernel[grid](seed, position, bits, noise, vocab_size, TILE=1024, INTERPRETED=interpreted)

    drawn = []
    mix = module._mix
    monkeypatch.setattr(module, "_mix", lambda x: drawn.append(mix(x)) or drawn[-1])
    expected = exponential_noise(seed, position, vocab_size)
    assert torch.equal(bits, drawn[-1])
    assert_few_ulps(noise, expected, bits)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_of_extreme_bits(device):
    """The smallest variates, which decide the arg-max, and the largest, which must stay finite."""
    small = torch.arange(0, 512)
    bits = torch.cat([small, 2**32 - 1 - small, 2**24 - 256 + small, 2**31 - 256 + small]).to(device)
    noise = torch.zeros(2048, device=device)
    _noise_of_bits_kernel[(1,)](bits, noise, TILE=2048, INTERPRETED=triton.knobs.runtime.interpret)
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    assert_few_ulps(noise, -torch.log1p(-uniform), bits)
    assert noise.isfinite().all()
    assert (noise > 0).all()


def assert_few_ulps(noise, expected, bits):
    torch.testing.assert_close(noise, expected, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    # And not only alike: the variate of the bits, in float64.
    uniform = ((bits.float() + 0.5).double() * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    torch.testing.assert_close(noise.double(), -torch.log1p(-uniform), rtol=6 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("bits", [0, 1, 0xFFFFFF7F, 0xFFFFFFFF])
def test_reference_noise_of_extreme_bits(monkeypatch, bits):
    """Rounded up to 1, a uniform number would make the noise infinite, and the only allowed token impossible."""
    monkeypatch.setattr(module, "_mix", lambda x: torch.full_like(x, bits))
    one = torch.ones(1, dtype=torch.int64)
    noise = exponential_noise(one, one, 4)
    assert noise.isfinite().all()
    assert (noise > 0).all()
    logits = torch.tensor([[-torch.inf, -torch.inf, 9.0, -torch.inf]])
    assert sample_tokens(logits, torch.ones(1), one, one).tolist() == [2]


# -- arguments and graphs ------------------------------------------


@pytest.mark.parametrize("run", [sample_tokens, pytest.param(sample_tokens_triton, marks=pytest.mark.interpreted)])
def test_no_rows(run):
    none = torch.zeros(0, dtype=torch.int64)
    assert run(torch.zeros(0, 10), none.float(), none, none).shape == (0,)


def test_bad_arguments():
    logits, temperature, seed, position = make(5, 4, 10, torch.float32, "cpu")
    for arguments, message in [
        ((logits[0], temperature, seed, position), "R, V"),
        ((logits[:, :0], temperature, seed, position), "V > 0"),
        ((logits.long(), temperature, seed, position), "float"),
        ((logits.t().contiguous().t(), temperature, seed, position), "last dim"),
        ((logits, temperature.double(), seed, position), "temperature"),
        ((logits, temperature, seed[1:], position), "seed"),
        ((logits, temperature, seed, position.int()), "position"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample_tokens(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 33, 256])
def test_gpu_full_vocabulary(dtype, rows):
    arguments = make(6, rows, 151_936, dtype, "cuda")
    assert_as_reference(sample_tokens(*arguments), *arguments)


@pytest.mark.gpu
def test_gpu_tokens_of_a_seed_are_the_cpus():
    logits, temperature, seed, position = make(8, 64, 20_000, torch.bfloat16, "cpu")
    tokens = sample_tokens(logits.cuda(), temperature.cuda(), seed.cuda(), position.cuda())
    assert_as_reference(tokens.cpu(), logits, temperature, seed, position)


@pytest.mark.gpu
def test_gpu_logits_past_two_billion_elements():
    vocab_size = 151_936
    rows = 2**31 // vocab_size + 20
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    target = torch.arange(rows, device="cuda") * 7919 % vocab_size
    logits[torch.arange(rows, device="cuda"), target] = 100.0
    heat = torch.full((rows,), 0.5, device="cuda")
    heat[::2] = 0.0
    assert torch.equal(sample_tokens(logits, heat, target, target), target)


@pytest.mark.gpu
def test_gpu_graph_serves_every_mix_of_rows():
    logits, temperature, seed, position = make(9, 5, 20_000, torch.bfloat16, "cuda")
    sample_tokens(logits, temperature, seed, position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_tokens(logits, temperature, seed, position)
    for round_ in range(4):
        fresh = make(10 + round_, 5, 20_000, torch.bfloat16, "cuda")
        for old, new in zip((logits, temperature, seed, position), fresh, strict=True):
            old.copy_(new)
        temperature[round_] = 0.0
        graph.replay()
        assert_as_reference(tokens, logits, temperature, seed, position)
