"""`model.generate` with images, as processors make its arguments, equals stock's and runs on the engine."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from image_calls import (
    ending_on_an_image,
    image_call,
    seeing_model,
    with_cut_spans,
    with_log_probabilities,
    without_adds,
    without_positions,
    without_spans,
)
from image_models import END, IMAGE, MODELS, START, VIDEO, WITH_STATES
from recurrent_models import with_idiom
from support import (
    assert_falls_back,
    assert_idle,
    assert_native_parity,
    assert_same_tensor,
    batch,
    num_calls,
    stock_copy,
    stock_generate,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged.engine.engine import Engine
from hf_paged.engine.session import Request, Session
from hf_paged.models import paged_calls
from hf_paged.models.images import recording
from hf_paged.models.images.decoder_inputs import MASK
from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.options.request_spec import RequestSpec

SPANS = ("gemma3", "gemma4")  # tokens of an image see each other
CORE = ("qwen2.5-vl", "qwen3-vl", "smolvlm", "gemma3", "qwen3.5")
CASES, ALL_CASES = (
    [pytest.param(name, marks=[*[with_idiom] * (name in WITH_STATES), *[pytest.mark.slow] * (name not in core)])
     for name in MODELS] for core in (CORE, ()))
STATES = pytest.param("qwen3.5", marks=with_idiom)
NEW = {"max_new_tokens": 6}
# Chunks smaller than an image; of images whose tokens see each other, chunks that end in front of one.
SMALL_STEPS, STEPS_OF_SPANS = ({"max_num_batched_tokens": tokens, "max_num_seqs": 4} for tokens in (5, 21))
ONE = [[5, "0", 6]]


def calls_of(model) -> dict[str, dict[str, Any]]:
    return {
        "one": image_call(model, ONE),
        "none to four": image_call(model, [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["1", 1, "1", "2", "0"]]),
        "other pixels": image_call(model, [[5, "4", 6]]),
        "another order": image_call(model, [[2, "3", 3, "1", 4]]),
        "an image at the end": ending_on_an_image(model),
        "text": image_call(model, [[9], [14]]),
    }


@pytest.mark.parametrize("name", CASES)
def test_each_call_equals_stocks(name):
    """In small chunks; twice, so that the second time the prefix cache has them."""
    model = seeing_model(name)
    calls = calls_of(model)
    expected = {kind: stock_generate(model, **call, **NEW) for kind, call in calls.items()}
    assert not torch.equal(expected["one"], expected["other pixels"])
    hf_paged.enable(model, strict=True, **STEPS_OF_SPANS if name in SPANS else SMALL_STEPS)
    for _ in range(2):
        for kind, call in calls.items():
            assert_native_parity(model, expected[kind], **call, **NEW)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0


@pytest.mark.parametrize("name", CASES)
def test_preempted_rows_are_fed_again(name):
    model = seeing_model(name)
    call = image_call(model, [[5, "0", 6], [4, "4", 3], [2, "8", 9]]) | {"max_new_tokens": 24}
    expected = stock_generate(model, **call)
    blocks = -(-expected.shape[1] // 16)
    hf_paged.enable(model, strict=True, num_blocks=2 * blocks, block_size=16, enable_prefix_caching=False)
    assert_native_parity(model, expected, **call)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


@pytest.mark.parametrize("name", ["qwen3-vl", *(case for case in ALL_CASES if case.values[0] != "qwen3-vl")])
def test_rows_of_one_prompt_share_what_is_fed(name, monkeypatch):
    model, specs = seeing_model(name), []
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda *args: (specs.append(args[2]), add(*args))[1])
    call = image_call(model, [[15, "0", 6]]) | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    expected = stock_generate(model, **call, **NEW)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **call, **NEW)
    runs = [spec.fed.runs[0] for spec in specs]
    contents = len({run.identity for run in runs})
    assert len({rows.data_ptr() for run in runs for rows in run.rows.values()}) == contents * len(runs[0].rows)
    assert len(runs) == 3 and (contents == 1 or name == "kimi-k2.5")  # whose tower in 5.17 rounds equal images unlike


@pytest.mark.parametrize("name", ["qwen2.5-vl", *(case for case in ALL_CASES if case.values[0] != "qwen2.5-vl")])
def test_log_probabilities_are_stocks(name):
    model = seeing_model(name)
    call = image_call(model, [[5, "0", 6], [2, "1", 3, "3", 4]]) | NEW
    stock = stock_copy(model).generate(**call, output_logits=True, return_dict_in_generate=True)
    sequences, found = with_log_probabilities(hf_paged.enable(model, strict=True), call)
    assert_same_tensor(sequences, stock.sequences)
    for row, values in enumerate(found):
        made = torch.stack([logits[row] for logits in stock.logits]).log_softmax(-1)
        assert np.allclose(values, made[range(6), sequences[row, -6:]], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2.5-vl", STATES, pytest.param("internvl", marks=pytest.mark.slow)])
def test_a_call_as_trl_makes_it(name):
    """In train mode, with the image of a prompt once for each of its completions."""
    model = seeing_model(name).train()
    call = image_call(model, [[15, "0", 6]] * 3 + [[15, "4", 6]] * 3)
    config = GenerationConfig(do_sample=False, suppress_tokens=[IMAGE], pad_token_id=0, max_new_tokens=6)
    expected = stock_generate(model, **call, generation_config=config, disable_compile=True)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **call, generation_config=config, disable_compile=True)
    assert model.training and hf_paged.get_engine(model).stats().prefix_cache_hits >= 4 * 16


@pytest.mark.parametrize("name", ["qwen2.5-vl", STATES])
def test_beside_calls_of_another_thread(name):
    model = seeing_model(name)
    texts, images = batch([30, 9]) | {"max_new_tokens": 30}, image_call(model, [[5, "0", 6], [3, "1", 4]]) | NEW
    expected = stock_generate(model, **texts), stock_generate(model, **images)
    hf_paged.enable(model, strict=True, **SMALL_STEPS)
    found: list[torch.Tensor] = []
    beside = threading.Thread(target=lambda: found.append(model.generate(**texts)))
    beside.start()
    mixed = [model.generate(**images) for _ in range(3)]
    beside.join(60)
    assert all(torch.equal(one, expected[1]) for one in mixed) and torch.equal(found[0], expected[0])
    assert_idle(model)


@pytest.mark.parametrize(("name", "hits"), [
    ("smolvlm", 16 + 32), ("qwen3-vl", 16 + 32),
    pytest.param("qwen3.5", 46, marks=with_idiom),  # no state is known where text and image part
])
def test_text_with_the_same_ids_never_hits_what_images_made(name, hits):
    model = seeing_model(name)
    seen = image_call(model, [[20, "0", 20]])
    blind = {key: value for key, value in seen.items() if key in ("input_ids", "attention_mask")}
    expected = [stock_generate(model, **call, **NEW) for call in (seen, blind)]
    assert not torch.equal(*expected)
    for calls in ((0, 1, 0), (1, 0, 1)):
        hf_paged.enable(model, strict=True, block_size=16)
        for number in calls:
            assert_native_parity(model, expected[number], **(seen, blind)[number], **NEW)
        assert hf_paged.get_engine(model).stats().prefix_cache_hits == hits
        hf_paged.disable(model)


def test_drafts_have_the_positions_of_their_places():
    model = seeing_model("qwen2.5-vl")
    text = list(range(20, 26))
    call = image_call(model, [[text, "1", text * 3]])
    call |= {"max_new_tokens": 30, "suppress_tokens": [IMAGE], "repetition_penalty": 0.2, "prompt_lookup_num_tokens": 3}
    expected = stock_generate(model, **call)
    assert_native_parity(hf_paged.enable(model, strict=True), expected, **call)
    assert hf_paged.get_engine(model).stats().num_accepted_draft_tokens > 0


@pytest.mark.parametrize("name", ["qwen2.5-vl", STATES, pytest.param("qwen2-vl", marks=pytest.mark.slow)])
def test_a_video_of_more_frames_than_rows(name):
    """Its last position on one axis is above that of the others. Qwen3.5 has each frame behind a time."""
    model = seeing_model(name)
    video = [9, START, *[VIDEO] * 4, END] * 6 if name == "qwen3.5" else [START, *[VIDEO] * 24, END]
    call = image_call(model, [[3, video, 4, "1", 5]])
    generator = torch.Generator().manual_seed(9)
    call["mm_token_type_ids"] += 2 * (call["input_ids"] == VIDEO)
    call |= {"video_grid_thw": torch.tensor([[6, 4, 4]]), "pixel_values_videos": torch.randn(
        96, call["pixel_values"].shape[1], generator=generator)}
    if name == "qwen2.5-vl":
        call["second_per_grid_ts"] = torch.tensor([1.0])
    assert_native_parity(hf_paged.enable(model, strict=True, **SMALL_STEPS), **call, **NEW)


@pytest.mark.parametrize("name", ["qwen3-vl", *(case for case in ALL_CASES if case.values[0] != "qwen3-vl")])
def test_placeholders_that_are_generated(name):
    """Behind a prompt they are tokens as others."""
    model = seeing_model(name)
    with torch.no_grad():
        model.lm_head.weight[IMAGE] *= 6
    call = image_call(model, ONE) | {"max_new_tokens": 12}
    expected = stock_generate(model, **call)
    assert IMAGE in expected[0, call["input_ids"].shape[1]:]
    assert_native_parity(hf_paged.enable(model, strict=True), expected, **call)


@pytest.mark.parametrize(("name", "hits"), [("qwen2.5-vl", 32), pytest.param("qwen3.5", 37, marks=with_idiom)])
def test_a_turn_with_an_earlier_turn_as_prefix(name, hits):
    """Answers were computed at plain steps, so that the next turn hits them, too; another caller comes between."""
    model = hf_paged.enable(seeing_model(name), strict=True)
    first = image_call(model, [[5, "0", 6]])
    answer = model.generate(**first, max_new_tokens=20)[0, first["input_ids"].shape[1]:].tolist()
    model.generate(**batch([9]), **NEW)
    second = image_call(model, [[first["input_ids"][0, 1:6].tolist(), "0", first["input_ids"][0, -6:].tolist(), answer,
                                 3, "1", 2]])
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    assert_native_parity(model, **second, **NEW)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits - before == hits


@pytest.mark.parametrize("name", ["qwen3-vl", STATES])
def test_weights_of_the_tower_that_change_between_calls(name):
    model = seeing_model(name)
    call = image_call(model, ONE) | NEW
    hf_paged.enable(model, strict=True)
    before = assert_native_parity(model, **call)
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            weight.mul_(1.2)
    assert not torch.equal(assert_native_parity(model, **call), before)


def test_a_call_that_stock_refuses():
    """The engine goes on as if the call had not come."""
    model = seeing_model("smolvlm")
    call = image_call(model, ONE)
    call["input_ids"][0, 8] = 7
    with pytest.raises(ValueError) as stocks:
        stock_generate(model, **call, **NEW)
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        with pytest.raises(ValueError) as ours:
            model.generate(**call, **NEW)
    assert str(ours.value) == str(stocks.value)
    assert_native_parity(model, **image_call(model, ONE), **NEW)


def _with_stocks_delta(prompt):
    """One number for all axes, from the largest position, as `rope_deltas` has it."""
    class Other(FedPrompt):
        def positions_of(self, first, end):
            axes, length = self.positions.shape
            after = int(self.positions.max()) + 1 - length
            later = np.tile(np.arange(max(first, length), end) + after, (axes, 1))
            return np.concatenate([self.positions[:, first:end], later], 1)

    return Other(prompt.ids, prompt.runs, prompt.positions)


def _without_rows(prompt):
    return dataclasses.replace(prompt, runs=())


@pytest.mark.parametrize(("name", "change", "call"), [
    ("qwen2.5-vl", without_positions, image_call), ("qwen3-vl", without_positions, image_call),
    ("qwen2.5-vl", _with_stocks_delta, lambda model, _: ending_on_an_image(model)),
    ("qwen3-vl", without_adds, image_call), ("gemma3", without_spans, image_call),
    ("gemma3", with_cut_spans, image_call),
    pytest.param("qwen3.5", _without_rows, image_call, marks=with_idiom),
    pytest.param("qwen3.5", without_positions, image_call, marks=with_idiom),
], ids=["positions", "positions, interleaved", "delta", "deepstack", "spans", "cuts", "rows, states",
        "positions, states"])
def test_each_part_changes_tokens(name, change, call, monkeypatch):
    """Controls: a call that leaves it out has other tokens, so the tests above would notice."""
    model, add = seeing_model(name), Engine.add
    inputs = call(model, [[12, "1", 6]]) | {"max_new_tokens": 16}
    hf_paged.enable(model, strict=True, **STEPS_OF_SPANS)
    expected = assert_native_parity(model, **inputs)
    monkeypatch.setattr(Engine, "add", lambda self, session, spec: add(
        self, session, spec.but(fed=change(spec.fed), cache_salt=b"another")))
    assert not torch.equal(model.generate(**inputs), expected)


@pytest.mark.parametrize("name", ["smolvlm", STATES])
def test_keys_without_what_was_fed_change_tokens(name, monkeypatch):
    model = seeing_model(name)
    one, other = image_call(model, [[5, "0", 20]]), image_call(model, [[5, "4", 20]])
    expected = stock_generate(model, **other, **NEW)
    monkeypatch.setattr(FedPrompt, "block_key", lambda *_: b"")
    hf_paged.enable(model, strict=True)
    model.generate(**one, **NEW)
    assert not torch.equal(model.generate(**other, **NEW), expected)


def test_calls_without_a_cache_go_to_stock():
    model = seeing_model("smolvlm")
    assert_falls_back(model, "use_cache=False with images", **image_call(model, ONE), **NEW, use_cache=False)


def test_positions_given_by_the_caller():
    """Stock takes them with other axes, too; it makes masks of packed sequences of positions that do not rise."""
    model = seeing_model("qwen2.5-vl")
    call = image_call(model, ONE)
    positions, _ = model.model.get_rope_index(**{name: value for name, value in call.items() if name != "pixel_values"})
    expected = stock_generate(model, **call, **NEW)
    flat = torch.arange(call["input_ids"].shape[1])[None]
    hf_paged.enable(model)
    stock = stock_copy(model)
    for given in (positions, torch.cat([flat.flip(-1)[None], positions])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_paged.FallbackWarning)
            result = model.generate(**call, position_ids=given, **NEW)
        assert_same_tensor(result, stock_generate(stock, **call, position_ids=given, **NEW))
    assert num_calls(model) == {"stock": 2}
    assert_native_parity(model, expected, **call, **NEW)
    other = seeing_model("gemma3")
    call = image_call(other, ONE)
    falling = torch.arange(call["input_ids"].shape[1]).flip(-1)[None]
    assert_falls_back(other, "position_ids given by the caller", **call, position_ids=falling, **NEW)


def test_a_video_whose_positions_are_farther_apart_than_its_tokens():
    """Frequencies of dynamic RoPE depend on the longest row: a text call behind it once hit its blocks."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    model = seeing_model("qwen2.5-vl", rope_parameters=rope, max_position_embeddings=128)
    call = image_call(model, [[3, [START, *[VIDEO] * 24, END], 14, "1", 15]])
    call["mm_token_type_ids"] += 2 * (call["input_ids"] == VIDEO)
    pixels = torch.randn(96, call["pixel_values"].shape[1], generator=torch.Generator().manual_seed(9))
    call |= {"video_grid_thw": torch.tensor([[6, 4, 4]]), "pixel_values_videos": pixels}
    near, far = ({**call, "second_per_grid_ts": torch.tensor([each])} for each in (1.0, 10.0))
    expected = [stock_generate(model, **one, **NEW) for one in (near, far)]
    hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match="end at 128"):
        assert_same_tensor(model.generate(**far, **NEW), expected[1])
    assert_native_parity(model, expected[0], **near, **NEW)


def test_spans_that_no_step_has_room_for():
    model = hf_paged.enable(seeing_model("gemma3"), max_num_batched_tokens=19, max_num_seqs=4)
    with pytest.warns(hf_paged.FallbackWarning, match="16 tokens see each other, and a step has room for 15"):
        model.generate(**image_call(model, ONE), **NEW)


def test_images_of_a_decoder_that_gets_what_is_not_known(monkeypatch):
    monkeypatch.setattr(recording, "_KNOWN", recording._KNOWN - {MASK})
    model = seeing_model("qwen3-vl")
    assert_falls_back(model, f"images of a model whose decoder is given {MASK}", **image_call(model, ONE), **NEW)


def test_a_request_that_starts_again_is_fed_the_same():
    spec = RequestSpec(prompt=[1, 2], request_id="r", fed=FedPrompt([1, 2], ()))
    request = Request.of(spec, Session(stream=True), vocab_size=9, max_model_len=9, on_weight_change="recompute")
    request.restart([3])
    assert request.sequence.fed is spec.fed


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3"])
def test_attention_of_the_tower_is_its_own(name, monkeypatch):
    """Before, after and in steps, beside which images of other threads run through the tower."""
    model = seeing_model(name)
    tower, text, seen = model.config.vision_config, model.config.text_config, []
    tower._attn_implementation, text._attn_implementation = "eager", "sdpa"
    call, stored = image_call(model, ONE) | NEW, paged_calls.store_kv
    expected = stock_generate(model, **call)

    def store(*args, **kwargs):
        seen.append((text._attn_implementation, tower._attn_implementation))
        return stored(*args, **kwargs)

    monkeypatch.setattr(paged_calls, "store_kv", store)
    hf_paged.enable(model, strict=True)
    seen.clear()  # of the proof
    assert_native_parity(model, expected, **call)
    assert {*seen} == {(paged_calls.NAME, "eager")}
    assert (text._attn_implementation, tower._attn_implementation) == ("sdpa", "eager")
