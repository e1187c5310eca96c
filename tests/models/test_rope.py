"""The table of cosines and sines is what the model's own rotary module gives, now and after every change."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from support import assert_native_parity, batch, stock_generate, tiny_config, tiny_model
from transformers import GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import hf_paged
from hf_paged.models.rope import RopeTable

LENGTH = 64
THETA = {"rope_theta": 10_000.0}
ORIGINAL = {"original_max_position_embeddings": LENGTH}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
                 "long_factor": [2.0 + i for i in range(8)], **ORIGINAL},
}
CPU = torch.device("cpu")


def config(name):
    positions = 4 * LENGTH if name == "longrope" else LENGTH
    return tiny_config(rope_parameters=ROPES[name] | THETA, max_position_embeddings=positions)


def rope_model(name):
    positions = 4 * LENGTH if name == "longrope" else LENGTH
    return tiny_model(rope_parameters=ROPES[name] | THETA, max_position_embeddings=positions)


def table_of(rotary, dtype=torch.float32, length=LENGTH):
    table = RopeTable()
    table.update(rotary, length, dtype, CPU)
    return table


def assert_is_the_modules(table, rotary, length=LENGTH):
    """Compared position by position, as stock's decode steps ask the module."""
    assert table.cos.shape == table.sin.shape == (length - 1, 16)
    rotary = copy.deepcopy(rotary)
    like = torch.empty(0, dtype=table.cos.dtype)
    for position in range(length - 1):
        cos, sin = rotary(like, torch.tensor([[position]]))
        assert torch.equal(table.cos[position], cos[0, 0]), position
        assert torch.equal(table.sin[position], sin[0, 0]), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROPES)
def test_the_table_is_the_modules_output_at_every_position(name, dtype):
    rotary = Qwen3RotaryEmbedding(config(name))
    table = table_of(rotary, dtype)
    assert table.cos.dtype == table.sin.dtype == dtype
    assert_is_the_modules(table, rotary)


@pytest.mark.parametrize("name", ROPES)
def test_types_differ_so_that_a_wrong_table_would_show(name):
    table = table_of(Qwen3RotaryEmbedding(config(name)))
    default = table_of(Qwen3RotaryEmbedding(config("default")))
    # Up to its length the dynamic type is the default one.
    assert torch.equal(table.cos, default.cos) == (name in ("default", "dynamic"))


@pytest.mark.parametrize("name", ROPES)
def test_generate_equals_stock_up_to_the_last_position(name):
    model = hf_paged.enable(rope_model(name), strict=True)
    assert_native_parity(model, **batch([LENGTH - 10, 7]), max_new_tokens=10)
    assert_native_parity(model, **batch([LENGTH - 1]), max_new_tokens=1)


def _in_place(rotary):
    rotary.inv_freq.mul_(3.0)


def _by_data(rotary):
    rotary.inv_freq.data.mul_(3.0)


def _new_buffer(rotary):
    rotary.register_buffer("inv_freq", rotary.inv_freq * 3.0, persistent=False)


def _one_frequency(rotary):
    rotary.inv_freq[-1] *= 100.0


def _scaling(rotary):
    rotary.attention_scaling *= 2.0


CHANGES = [_in_place, _by_data, _new_buffer, _one_frequency, _scaling]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_the_table_is_renewed_in_its_place_when_the_module_changes(change):
    rotary = Qwen3RotaryEmbedding(config("default"))
    table = table_of(rotary)
    cos, sin, old = table.cos, table.sin, table.cos.clone()
    change(rotary)
    table.update(rotary, LENGTH, torch.float32, CPU)
    assert table.cos is cos and table.sin is sin  # CUDA graphs read from there
    assert not torch.equal(cos, old)
    assert_is_the_modules(table, rotary)


def test_an_unchanged_module_is_not_asked_again():
    rotary, calls = Qwen3RotaryEmbedding(config("dynamic")), []
    rotary.register_forward_hook(lambda *args: calls.append(1))
    table = table_of(rotary)
    for _ in range(3):
        table.update(rotary, LENGTH, torch.float32, CPU)
    assert len(calls) == 1
    table.update(rotary, LENGTH, torch.bfloat16, CPU)
    assert len(calls) == 2
    assert table.cos.dtype == torch.bfloat16


def test_the_table_follows_the_length():
    rotary = Qwen3RotaryEmbedding(config("default"))
    table = table_of(rotary)
    for length in (128, 32, 1):
        table.update(rotary, length, torch.float32, CPU)
        assert len(table.cos) == len(table.sin) == max(1, length - 1)
    table.update(rotary, 128, torch.float32, CPU)
    assert_is_the_modules(table, rotary, 128)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_generate_follows_a_changed_module(change):
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([40, 20])
    first = assert_native_parity(model, **inputs, max_new_tokens=12)
    change(model.model.rotary_emb)
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=12), first)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("fresh", [False, True])
def test_generate_follows_a_module_changed_while_another_request_runs(change, fresh):
    """The engine does not become idle in between; `fresh`: nor does the prompt hit anything cached."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    inputs = batch([40, 20], seed=7)
    first = stock_generate(model, **inputs, max_new_tokens=12)
    if not fresh:
        assert_native_parity(model, first, **inputs, max_new_tokens=12)
    other = engine.add_request([1, 2, 3], GenerationConfig(max_new_tokens=200))
    engine.step()
    change(model.model.rotary_emb)
    expected = stock_generate(model, **inputs, max_new_tokens=12)
    assert not torch.equal(expected, first)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12), expected)
    engine.abort(other)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_a_stock_call_beyond_the_limit_left_behind(name):
    """These types change their module with the longest sequence; the next short call resets it, as stock's does."""
    model = rope_model(name)
    rotary = model.model.rotary_emb
    hf_paged.enable(model)
    short = {**batch([LENGTH - 20, 9]), "max_new_tokens": 12}
    first = assert_native_parity(model, **short)
    original = rotary.inv_freq.clone()
    for warned in (pytest.warns(hf_paged.FallbackWarning, match="max_model_len"), nullcontext()):
        with warned:
            model.generate(**batch([LENGTH + 20]), max_new_tokens=3)
        assert not torch.equal(rotary.inv_freq, original)
        assert torch.equal(assert_native_parity(model, **short), first)
        assert_is_the_modules(hf_paged.get_engine(model)._executor._rope, rotary)


def test_a_table_made_first_after_a_call_beyond_the_limit():
    model = rope_model("dynamic")
    short = {**batch([LENGTH - 20, 9]), "max_new_tokens": 12}
    expected = model.generate(**short)
    model.generate(**batch([LENGTH + 20]), max_new_tokens=3)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **short)
