"""Calls with images that only stock's decoding loop carries out run over the engine's forwards, with stock's output."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from image_calls import (
    ending_on_an_image,
    image_call,
    seeing_model,
    with_cut_spans,
    without_adds,
    without_positions,
    without_spans,
)
from image_models import IMAGE, MODELS, WITH_STATES
from support import (
    LOGITS,
    Until,
    assert_close_steps,
    assert_falls_back,
    assert_idle,
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    num_calls,
    stock_copy,
    stock_generate,
)
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import hf_paged
from hf_paged.engine.engine import Engine
from hf_paged.integration.recognise.images import with_images
from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.options.request_spec import RequestSpec
from hf_paged.scheduler import lockstep_rows

SPANS = ("gemma3", "gemma4")  # tokens of an image see each other
CORE = ("qwen2.5-vl", "qwen3-vl", "smolvlm", "gemma3")
NATIVE = [name for name in MODELS if name not in WITH_STATES]
CASES = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in NATIVE]
LATENTS = ("kimi-k2.5",)  # whose pages hold something else than stock's cache
# Chunks smaller than an image; of images whose tokens see each other, chunks that end in front of one.
SMALL_STEPS, STEPS_OF_SPANS = ({"max_num_batched_tokens": tokens, "max_num_seqs": 4} for tokens in (5, 21))
ROWS = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["1", 1, "1", "2", "0"]]
ONE = [[5, "0", 6]]
EVERYTHING = LOGITS | {"output_scores": True}


class Raising(LogitsProcessor):
    """Raises the score of a token that depends on the place; calls `between` in each step."""

    def __init__(self, between=lambda: None):
        self.between = between

    def __call__(self, input_ids, scores):
        self.between()
        raised = scores.clone()
        raised[:, 7 * input_ids.shape[1] % 200] += 1.0
        return raised


def steps_of(name: str) -> dict[str, Any]:
    return {"strict": True, **(STEPS_OF_SPANS if name in SPANS else SMALL_STEPS)}


def own_code(width: int) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Raising()]),
            "stopping_criteria": StoppingCriteriaList([Until(width + 3)])}


@pytest.mark.parametrize("name", CASES)
def test_beams_are_stocks(name):
    """Sequences, their scores, those of each step, and the indices of beams, of prompts in small chunks."""
    model = seeing_model(name)
    more = {} if name in LATENTS else EVERYTHING
    for beams, returned in ((2, 1), (4, 3)):
        assert_lockstep(model, **image_call(model, ROWS), max_new_tokens=8, num_beams=beams, paged=steps_of(name),
                        num_return_sequences=returned, **more)
    assert_lockstep(model, **ending_on_an_image(model), max_new_tokens=8, num_beams=3, paged=steps_of(name))


@pytest.mark.parametrize("name", CASES)
def test_processors_and_criteria_of_the_callers_own(name):
    model = seeing_model(name)
    call = image_call(model, ROWS)
    width = call["input_ids"].shape[1]
    output = assert_lockstep(model, **call, **own_code(width), max_new_tokens=12, paged=steps_of(name))
    assert output.shape[1] == width + 6
    call = image_call(model, [[3, "2", 4], ["0", 9]])
    more = {} if name in LATENTS else EVERYTHING
    assert_lockstep(model, **call, max_new_tokens=6, do_sample=True, num_return_sequences=2, **own_code(width), **more)
    assert_lockstep(model, **ending_on_an_image(model), max_new_tokens=6, **own_code(width))


@pytest.mark.parametrize("name", CASES)
def test_drafts_by_prompt_lookup(name):
    model = seeing_model(name)
    text = list(range(20, 26))
    call = image_call(model, [[text, "1", text * 3]]) | {"suppress_tokens": [IMAGE], "prompt_lookup_num_tokens": 3}
    assert_lockstep(model, **call, max_new_tokens=14, logits_processor=LogitsProcessorList([Raising()]))
    assert num_calls(model) == {"lockstep": 1}


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3"])
def test_prefixes_are_shared_with_native_calls_that_were_fed_the_same(name):
    model = seeing_model(name)
    seen, other = (image_call(model, [[20, image, 20]]) | {"max_new_tokens": 6} for image in ("0", "4"))
    expected = [stock_generate(model, **call, num_beams=beams) for call in (seen, other) for beams in (1, 3)]
    assert not torch.equal(expected[1], expected[3])
    for calls in ((0, 1, 3, 2), (3, 2, 1, 0)):
        hf_paged.enable(model, strict=True, block_size=16)
        engine, hits = hf_paged.get_engine(model), []
        for number in calls:
            assert_same_tensor(model.generate(**(seen, other)[number // 2], num_beams=1 + number % 2 * 2),
                               expected[number])
            hits.append(engine.stats().prefix_cache_hits - sum(hits))
        full = seen["input_ids"].shape[1] // 16 * 16
        assert full >= 32 and hits == [0, full, 16, full]  # a block of text is in front of the image
        hf_paged.disable(model)


def test_answers_of_the_last_beams_are_in_the_prefix_cache():
    model = hf_paged.enable(seeing_model("qwen2.5-vl"), strict=True)
    first, hits = image_call(model, ONE), []
    answers = model.generate(**first, max_new_tokens=20, num_beams=3, num_return_sequences=3)
    for answer in answers[:, first["input_ids"].shape[1]:].tolist():
        before = hf_paged.get_engine(model).stats().prefix_cache_hits
        second = image_call(model, [[first["input_ids"][0, 1:6].tolist(), "0", first["input_ids"][0, -6:].tolist(),
                                     answer, 3, "1", 2]])
        assert_native_parity(model, **second, max_new_tokens=6)
        hits.append(hf_paged.get_engine(model).stats().prefix_cache_hits - before)
    assert hits[0] == 16 and hits[1] >= 32  # stock's last step dropped the first


@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl", "gemma3"])
def test_rows_of_one_prompt_are_one_only_if_they_are_fed_the_same(name, monkeypatch):
    """Equal ids with other pixels are computed apart: taken for one prompt, they have other tokens."""
    model = seeing_model(name)
    call = image_call(model, [[5, "0", 6], [5, "4", 6], [5, "0", 6]]) | {"max_new_tokens": 6}
    expected = stock_generate(model, **call, num_beams=2)
    assert not torch.equal(expected[0], expected[1])
    hf_paged.enable(model, strict=True, enable_prefix_caching=False)
    assert_same_tensor(model.generate(**call, num_beams=2), expected)
    length = int(call["attention_mask"][0].sum())
    # Without a prefix cache nothing is kept to compare contents of rows that are apart with.
    assert hf_paged.get_engine(model).stats().num_prefill_tokens in (2 * length, 3 * length)
    monkeypatch.setattr(lockstep_rows, "_kind", lambda seq: (tuple(seq.prompt_token_ids), None, b""))
    assert not torch.equal(model.generate(**call, num_beams=2), expected)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", pytest.param("gemma4", marks=pytest.mark.slow)])
def test_rows_that_lost_their_blocks_are_fed_again(name):
    model = seeing_model(name)
    call = image_call(model, ROWS) | {"max_new_tokens": 12, "num_beams": 2}
    expected = stock_generate(model, **call, logits_processor=LogitsProcessorList([Raising()]))
    engine = hf_paged.get_engine(hf_paged.enable(model, **steps_of(name), enable_prefix_caching=False))
    steps = []

    def lose():
        steps.append(engine.stats().num_prefill_tokens)
        if len(steps) in (1, 5, 6):
            with engine._held():
                engine._core.batches[0].give_back()

    found = model.generate(**call, logits_processor=LogitsProcessorList([Raising(lose)]))
    assert_same_tensor(found, expected)
    assert [after > before for before, after in itertools.pairwise(steps)][:7] == [
        True, False, False, False, True, True, False]
    assert_idle(model)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_positions_go_with_rows_that_are_reordered(name):
    """Rows of two prompts whose positions are unlike far from those of text, in each other's place."""
    model = seeing_model(name)
    calls = [image_call(model, [row]) for row in ([4, "1", 6], [2, "2", 3, "1", 1], [9])]
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    specs = []
    for call in calls:
        ids = call["input_ids"][0].tolist()
        inputs = {key: value for key, value in call.items() if key not in ("input_ids", "attention_mask")}
        specs.append(with_images(engine, RequestSpec(ids, 4), inputs, nullcontext()))
    assert len({tuple(spec.fed.offsets) for spec in specs[:2]}) == 2
    specs, calls = [*specs, specs[0]], [*calls, calls[0]]  # a row that is forked
    tokens, parents = [[11, 12, 13], [21, 22, 23], [31, 32, 33], [41, 42, 43]], [1, 2, 0, 1]
    with engine.lockstep(specs) as rows:
        rows.prompts()
        assert offsets_on_device(engine, rows) == offsets_of(specs)
        rows.decode(torch.tensor([[one[0]] for one in tokens]))
        rows.reorder(parents)
        assert offsets_on_device(engine, rows) == offsets_of([specs[parent] for parent in parents])
        found = torch.cat([rows.decode(torch.tensor([[one[1]] for one in tokens])),
                           rows.decode(torch.tensor([[one[2]] for one in tokens]))], 1)
    for row, parent in enumerate(parents):
        forced = [tokens[parent][0], *tokens[row][1:]]
        assert_close_steps((found[row, -1],), (after(model, calls[parent], forced),))


def offsets_of(specs) -> list[list[int]]:
    """Of each row by axis."""
    axes = max(len(spec.fed.offsets) for spec in specs if spec.fed is not None)
    return [[0] * axes if spec.fed is None else spec.fed.offsets.tolist() for spec in specs]


def offsets_on_device(engine, rows) -> list[list[int]]:
    """Of each row's slot, which CUDA graphs read."""
    slots = torch.from_numpy(rows.rows.slots).long()
    return engine._core.runner.state.axis_offsets.fed(slots, torch.zeros_like(slots)).positions.T.tolist()


def after(model, call, tokens) -> torch.Tensor:
    """Stock's logits after these tokens behind a prompt."""
    width = call["input_ids"].shape[1]

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + 1e6 * torch.nn.functional.one_hot(
                torch.tensor([[*tokens, 0][input_ids.shape[1] - width]]), scores.shape[1])

    made = stock_copy(model).generate(**call, max_new_tokens=len(tokens) + 1,
                                      logits_processor=LogitsProcessorList([Forced()]), **LOGITS)
    return made.logits[-1][0]


def test_rows_forget_no_tokens_of_prompts_with_images():
    model = hf_paged.enable(seeing_model("smolvlm"), strict=True)
    fed = FedPrompt([1, 2, 3], (), None)
    with hf_paged.get_engine(model).lockstep([RequestSpec([1, 2, 3], 4, fed=fed)]) as rows:
        rows.prompts()
        rows.decode(torch.tensor([[4, 5]]))
        rows.crop(2)
        with pytest.raises(ValueError, match="num_tokens=1: expected at most 0"):
            rows.crop(1)
    assert_idle(model)


@pytest.mark.parametrize("name", ["smolvlm", "qwen2.5-vl", "gemma3"])
def test_the_cache_of_the_result_is_stocks(name):
    """Pages have it, whoever picks the tokens; stock's has numbers of its own under the padding."""
    model = seeing_model(name)
    call = image_call(model, ONE)
    for options in ({}, {"output_scores": True}, {"num_beams": 2}):
        options = options | {"max_new_tokens": 6, "return_dict_in_generate": True}
        expected = stock_copy(model).generate(**call, **options)
        actual = assert_lockstep(model, **call, **options)
        assert type(actual.past_key_values) is type(expected.past_key_values)
        for ours, stocks in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert type(ours) is type(stocks)
            assert_close_steps((ours.keys, ours.values), (stocks.keys, stocks.values))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["gemma3", "smolvlm"])
def test_guidance_computes_rows_without_the_prompt_by_the_models_own_forward(name):
    model = seeing_model(name)
    call = image_call(model, [[5, "0", 6], [2, "1", 3]])
    assert_lockstep(model, **call, max_new_tokens=6, guidance_scale=1.5)


def test_a_processor_that_generates_from_other_images():
    model = seeing_model("qwen2.5-vl")
    call, inner = (image_call(model, rows) | {"max_new_tokens": 6} for rows in (ROWS, [[3, "2", 4], [9]]))

    def run(model, **kwargs):
        made = []
        own = Raising(lambda: made.append(model.generate(**inner, num_beams=1 + len(made) % 2)))
        return torch.cat([model.generate(**kwargs, logits_processor=LogitsProcessorList([own])).flatten(),
                          *(one.flatten() for one in made)])

    assert_lockstep(model, call=run, **call)


def test_beside_native_calls_of_another_thread():
    model = seeing_model("qwen2.5-vl")
    images, others = (image_call(model, rows) | {"max_new_tokens": 12} for rows in (
        [[5, "0", 6], [3, "1", 4]], [[7, "2", 6], [20]]))
    expected = stock_generate(model, **images, num_beams=2), stock_generate(model, **others)
    hf_paged.enable(model, strict=True, **SMALL_STEPS)
    found: list[torch.Tensor] = []
    beside = threading.Thread(target=lambda: found.extend(model.generate(**others) for _ in range(3)))
    beside.start()
    mixed = [model.generate(**images, num_beams=2) for _ in range(3)]
    beside.join(60)
    assert all(torch.equal(one, expected[0]) for one in mixed)
    assert len(found) == 3 and all(torch.equal(one, expected[1]) for one in found)
    assert_idle(model)


def _without_anything(prompt):
    return None


@pytest.mark.parametrize(("name", "change"), [
    ("qwen2.5-vl", without_positions), ("qwen3-vl", without_positions), ("qwen3-vl", without_adds),
    ("gemma3", without_spans), ("gemma3", with_cut_spans), ("smolvlm", _without_anything),
], ids=["positions", "positions, interleaved", "deepstack", "spans", "cuts", "vectors"])
def test_each_part_changes_beams(name, change, monkeypatch):
    """Controls: rows that leave it out have other scores, so the tests above would notice."""
    model, lockstep = seeing_model(name), Engine.lockstep
    call = image_call(model, [[12, "1", 6]]) | {"max_new_tokens": 12, "num_beams": 2} | EVERYTHING
    hf_paged.enable(model, strict=True, **STEPS_OF_SPANS)
    expected = stock_copy(model).generate(**call).sequences_scores
    assert torch.allclose(model.generate(**call).sequences_scores, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(Engine, "lockstep", lambda self, specs: lockstep(
        self, [spec.but(fed=change(spec.fed), cache_salt=b"another") for spec in specs]))
    assert not torch.allclose(model.generate(**call).sequences_scores, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "options", "reason"), [
    ("smolvlm", {"num_beams": 2, "use_cache": False}, "use_cache=False with images"),
    ("kimi-k2.5", {"num_beams": 2, "return_dict_in_generate": True}, "keys and values of beams"),
    ("kimi-k2.5", {"output_scores": True, "return_dict_in_generate": True}, "keys and values of prompts with images"),
])
def test_what_goes_to_stock(name, options, reason):
    model = seeing_model(name)
    assert_falls_back(model, reason, **image_call(model, ONE), max_new_tokens=6, **options)
