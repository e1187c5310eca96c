"""The table of cosines and sines is what the model's own rotary module gives, now and after every change."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from family_models import family_model
from support import (
    assert_native_parity,
    batch,
    random_prompts,
    stock_generate,
    tiny_config,
    tiny_model,
)
from transformers import GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import hf_paged
from hf_paged import PagedGenerator
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


@pytest.mark.each_value
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


# -- lengths beyond the model's positions ---------------------------------------------------------------------------

POSITIONS = 40
CHUNKS = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}  # as of Qwen3's model cards
STATIC = {name: ROPES[name] for name in ("default", "linear", "llama3")} | {"yarn": YARN}


def long_model(rope, **paged):
    """A model of 40 positions, enabled."""
    model = tiny_model(rope_parameters=rope | THETA, max_position_embeddings=POSITIONS)
    return hf_paged.enable(model, strict=True, **paged)


@pytest.mark.parametrize("overlap", [False, True])
def test_yarn_is_native_up_to_its_factor_times_the_original_length(overlap):
    """Prompts on both sides of the original length, of the positions, and in chunks that cross both."""
    model = long_model(YARN, **CHUNKS, overlap=overlap)
    assert_native_parity(model, **batch([108, 30, 33, 70, 1]), max_new_tokens=20)
    with pytest.raises(hf_paged.FallbackError, match="129 tokens with 1 new ones, and max_model_len is 128"):
        model.generate(**batch([128]), max_new_tokens=1)


@pytest.mark.parametrize("rope", STATIC.values(), ids=list(STATIC))
def test_lengths_that_are_asked_for_are_native_where_frequencies_depend_on_none(rope):
    model = long_model(rope, max_model_len=200, **CHUNKS)
    assert_native_parity(model, **batch([180, 30, 41, 7]), max_new_tokens=20)


@pytest.mark.parametrize("rope", STATIC.values(), ids=list(STATIC))
def test_log_probs_beyond_the_positions_are_those_of_stocks_forward(rope):
    """Each request has those that it has alone, whatever is beside it and however its prompt is cut."""
    prompts = random_prompts([170, 12, 39, 90])
    model = tiny_model(rope_parameters=rope | THETA, max_position_embeddings=POSITIONS)
    with PagedGenerator(model, max_model_len=200, **CHUNKS) as generator:
        outputs = generator.generate(prompts, max_new_tokens=16, logprobs=True, prompt_logprobs=True, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, ids[0, 1:, None])[:, 0]
        actual = torch.tensor([*output.prompt_logprobs[1:], *output.logprobs])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert output.token_ids == scores[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2"])
def test_a_family_that_is_not_fused_beyond_its_positions(family):
    model = family_model(family, max_position_embeddings=POSITIONS)
    hf_paged.enable(model, strict=True, max_model_len=150, **CHUNKS)
    assert_native_parity(model, **batch([100, 30]), max_new_tokens=20)


def test_layers_with_yarn_beside_layers_without():
    model = family_model("olmo3-yarn", max_position_embeddings=POSITIONS)
    hf_paged.enable(model, strict=True, **CHUNKS)
    assert_native_parity(model, **batch([300, 30]), max_new_tokens=20)  # 4 times 128 positions are all right


@pytest.mark.parametrize("lengths", [[LENGTH - 9], [LENGTH], [2 * LENGTH], [LENGTH - 3, 5], [2 * LENGTH, 5]])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_longest_row_are_left_to_stock(name, lengths):
    """Whatever length is asked for: also where a row of the batch is short, or only its last chunk is beyond."""
    expected = rope_model(name).generate(**batch(lengths), max_new_tokens=10)
    model = hf_paged.enable(rope_model(name), max_model_len=4 * LENGTH)
    reason = f"{max(lengths) + 10} tokens with 10 new ones, and beyond {LENGTH} the model's frequencies depend on"
    with pytest.warns(hf_paged.FallbackWarning, match=reason):  # "dynamic" remembers: each call has a model of its own
        assert torch.equal(model.generate(**batch(lengths), max_new_tokens=10), expected)
    with PagedGenerator(rope_model(name), max_model_len=4 * LENGTH) as generator:
        with pytest.raises(ValueError, match=f"beyond {LENGTH} the model's frequencies"):
            generator.generate(random_prompts([LENGTH]), max_new_tokens=1, use_tqdm=False)
        longest, _ = generator.generate(random_prompts([LENGTH - 1, 5]), max_new_tokens=1, use_tqdm=False)
        assert longest.finish_reason == "length"


def test_more_tokens_than_fit_end_at_the_limit_of_the_frequencies():
    """`Engine.add_request` cuts what comes; a step beyond would change the frequencies of all rows."""
    model = hf_paged.enable(rope_model("dynamic"), max_model_len=4 * LENGTH)
    engine, inputs = hf_paged.get_engine(model), random_prompts([LENGTH - 4])
    expected = stock_generate(model, input_ids=torch.tensor(inputs), max_new_tokens=4)[0, LENGTH - 4 :].tolist()
    engine.add_request(inputs[0], GenerationConfig(max_new_tokens=30))
    outputs = [output for _ in range(8) for output in engine.step()]
    completion = outputs[-1].completion
    assert (completion.token_ids, completion.finish_reason) == (expected, "length")


# -- a module that changes -------------------------------------------------------------------------------------------


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


@pytest.mark.each_value
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
    for warned in (pytest.warns(hf_paged.FallbackWarning, match=f"beyond {LENGTH} the model"), nullcontext()):
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
