"""The draws that the peers' published figures belong to, and the floors."""

from __future__ import annotations

import pytest
from floors import floor
from workloads import WORKLOADS, Workload, generation_configs, make_workload, qwen3_config

CEILINGS = {"copy_tb_s": 4.0, "gemm_tflop_s": 800.0}


@pytest.mark.parametrize(("name", "requests", "prompt_tokens", "output_tokens"), [
    ("nano", 256, 142_827, 133_966),
    ("single", 1, 128, 512),
    ("warm-prefix", 256, 256 * 2112, 256 * 64),
    ("no-prefix", 256, 256 * 2112, 256 * 64),
    ("shared-decode", 256, 256 * 4160, 256 * 512),
    ("rollouts", 512, 32 * 512, 512 * 512),
    ("long", 1, 131_072, 128),
    ("batch 8", 8, 8 * 256, 8 * 128),
])
def test_sizes(name, requests, prompt_tokens, output_tokens):
    workload = make_workload(name)
    assert workload.num_requests == requests
    assert sum(map(len, workload.prompts)) == prompt_tokens
    assert workload.output_tokens == output_tokens


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_what_is_shared_and_what_is_own(name, scale):
    workload = make_workload(name, scale)
    assert workload == make_workload(name, scale), "drawn anew, the same"
    heads = {tuple(prompt[: workload.shared]) for prompt in workload.prompts}
    assert len(heads) == 1
    assert len({tuple(prompt[workload.shared :]) for prompt in workload.prompts}) == len(workload.prompts)
    for config, length in zip(generation_configs(workload), workload.output_lengths, strict=True):
        assert (config.max_new_tokens, config.num_return_sequences or 1) == (length, workload.samples)
        assert bool(config.do_sample) == (workload.temperature > 0)


def test_floor_of_one_request_by_hand():
    config = qwen3_config("0.6B")
    in_layers = 28 * (1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072)
    weights = 2 * (in_layers + 151_936 * 1024)
    least = floor(Workload([[1] * 10], [3], 0.0), config, 2, CEILINGS)
    assert least.prefill == pytest.approx(weights / 4e12)  # ten tokens cannot pay for reading the weights
    assert least.weights == pytest.approx(2 * weights / 4e12)
    assert least.kv == least.kv_unshared == pytest.approx((11 + 12) * 2 * 28 * 8 * 128 * 2 / 4e12)


def test_a_shared_prefix_is_read_and_computed_once_in_the_floor():
    config = qwen3_config("0.6B")
    alone = floor(Workload([[1] * 4100], [2], 0.0), config, 2, CEILINGS)
    shared = Workload([[1] * 4096 + [i] * 4 for i in range(8)], [2] * 8, 0.0, shared=4096)
    together = floor(shared, config, 2, CEILINGS)
    assert together.kv_unshared == pytest.approx(8 * alone.kv)
    assert together.kv < 1.02 * alone.kv
    assert together.prefill < 1.1 * alone.prefill
    assert floor(shared._replace(warm=True), config, 2, CEILINGS).prefill < 0.2 * together.prefill
    samples = floor(Workload([[1] * 4100], [2], 1.0, samples=8), config, 2, CEILINGS)
    assert samples.kv_unshared == pytest.approx(8 * alone.kv)
    assert samples.kv < 1.02 * alone.kv


def test_the_floor_of_nano_is_near_the_published_one():
    nano = make_workload("nano")
    rate = nano.output_tokens / floor(nano, qwen3_config("0.6B"), 2, CEILINGS).seconds
    assert rate == pytest.approx(33_000, rel=0.1)
