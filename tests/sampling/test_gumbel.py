"""Random numbers of the sampler: the kernel draws the reference's bits, and both the variates of those bits."""

import pytest
import torch

from hf_paged.kernels._triton import jit, tl, triton
from hf_paged.sampling import gumbel as module
from hf_paged.sampling.gumbel import (
    GROUP_STREAM,
    exponential_noise,
    exponential_noise_at,
    exponential_of,
    hashed_bits,
    row_keys,
)


@jit()
def _noise_kernel(seed, position, bits, noise, vocab_size, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    key0, key1 = row_keys(tl.load(seed + row), tl.load(position + row))
    drawn = hashed_bits(token, key0, key1)
    tl.store(bits + row * vocab_size + token, drawn.to(tl.int64), mask=token < vocab_size)
    tl.store(noise + row * vocab_size + token, exponential_of(drawn, INTERPRETED), mask=token < vocab_size)


@jit()
def _noise_of_bits_kernel(bits, noise, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    lane = tl.arange(0, TILE)
    tl.store(noise + lane, exponential_of(tl.load(bits + lane).to(tl.uint32), INTERPRETED))


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


def test_noise_at_an_index_and_from_an_index_on():
    seed, position = torch.tensor([3, 4]), torch.tensor([5, 6])
    every = exponential_noise(seed, position, 100)
    index = torch.tensor([[7, 99], [0, 50]])
    assert torch.equal(exponential_noise_at(seed, position, index), every.gather(1, index))
    assert torch.equal(exponential_noise(seed, position, 40, 60), every[:, 60:])


def test_groups_and_tokens_draw_unrelated_numbers():
    seed, position = torch.arange(300), torch.full((300,), 8)
    tokens, groups = exponential_noise(seed, position, 300), exponential_noise(seed, position, 300, GROUP_STREAM)
    correlation = torch.corrcoef(torch.stack([tokens.flatten(), groups.flatten()]))[0, 1]
    assert abs(correlation) < 4.5 / 90_000**0.5
