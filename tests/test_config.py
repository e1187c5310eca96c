"""`PagedConfig` refuses what cannot work, naming field, value and what is accepted."""

from __future__ import annotations

import dataclasses

import pytest

from hf_paged import PagedConfig


def test_the_documented_defaults():
    config = PagedConfig()
    assert (config.block_size, config.num_blocks, config.gpu_memory_utilization) == (16, None, 0.9)
    assert (config.enable_prefix_caching, config.enforce_eager, config.strict) == (True, False, False)
    assert (config.attention_backend, config.seed) == ("auto", None)


def test_it_is_frozen_and_hashable():
    config = PagedConfig(block_size=32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 16
    assert hash(config) == hash(PagedConfig(block_size=32))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 1024])
def test_powers_of_two_are_block_sizes(block_size):
    assert PagedConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize(("field", "value"), [
    ("block_size", 8), ("block_size", 24), ("block_size", 0), ("block_size", -16), ("block_size", "16"),
    ("block_size", 16.0), ("block_size", True), ("block_size", None),
    ("num_blocks", 1), ("num_blocks", 0), ("num_blocks", 2.5),
    ("gpu_memory_utilization", 0.0), ("gpu_memory_utilization", 1.01), ("gpu_memory_utilization", -1),
    ("gpu_memory_utilization", "0.9"), ("gpu_memory_utilization", None), ("gpu_memory_utilization", float("nan")),
    ("max_num_seqs", 0), ("max_num_seqs", None), ("max_num_seqs", 1.0),
    ("max_num_batched_tokens", 255), ("max_num_batched_tokens", 0),
    ("max_model_len", 0), ("max_model_len", "long"),
    ("attention_backend", "sdpa"), ("attention_backend", None),
    ("seed", -1), ("seed", 1.5), ("strict", 1), ("strict", None), ("enable_prefix_caching", "yes"),
    ("group_prefixes", 1),
    ("enforce_eager", 0), ("overlap", 1), ("overlap", "auto"), ("on_weight_change", "drop"), ("on_weight_change", None),
])
def test_values_outside_the_limits_are_named(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        PagedConfig(**{field: value})


def test_a_budget_below_the_seats_says_so():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=10.*at least 20"):
        PagedConfig(max_num_seqs=20, max_num_batched_tokens=10)


def test_a_seed_beyond_what_requests_take_is_refused():
    with pytest.raises(ValueError, match="seed"):
        PagedConfig(seed=2**63)
