"""Images of models with a recurrent state in calls that stock's decoding loop carries out: stock's tokens."""

from __future__ import annotations

import pytest
import torch
from image_calls import ending_on_an_image, image_call, seeing_model
from integration.test_stock_loop_images import ONE, ROWS, Raising, own_code
from recurrent_models import with_idiom
from support import assert_falls_back, assert_idle, assert_lockstep, assert_same_tensor, stock_generate
from transformers import LogitsProcessorList

import hf_paged
from hf_paged.models.images.fed_rows import FedRows

pytestmark = with_idiom

CHUNKS = {"strict": True, "max_num_batched_tokens": 21, "max_num_seqs": 12}
SEEN, OTHER = [17, "1", 3], [17, "5", 3]  # equal ids


@pytest.fixture(params=["qwen3.5", "lfm2-vl", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe", "lfm3-vl", "minicpm-v-4.6"))])
def model(request):
    return seeing_model(request.param)


def test_beams_are_stocks(model):
    for beams, returned in ((2, 1), (3, 2)):
        assert_lockstep(model, **image_call(model, ROWS), max_new_tokens=8, num_beams=beams, paged=CHUNKS,
                        num_return_sequences=returned)
    assert_lockstep(model, **ending_on_an_image(model), max_new_tokens=8, num_beams=3)


def test_processors_and_criteria_of_the_callers_own(model):
    call = image_call(model, ROWS)
    width = call["input_ids"].shape[1]
    output = assert_lockstep(model, **call, **own_code(width), max_new_tokens=12, paged=CHUNKS)
    assert output.shape[1] == width + 6


def test_rows_that_lost_their_states_are_fed_again(model, monkeypatch):
    """A control leaves the vectors out the second time."""
    call = image_call(model, ROWS) | {"max_new_tokens": 12, "num_beams": 2}
    expected = stock_generate(model, **call, logits_processor=LogitsProcessorList([Raising()]))
    engine = hf_paged.get_engine(hf_paged.enable(model, **CHUNKS, enable_prefix_caching=False))
    of = FedRows.of
    for is_fed in (True, False):
        steps = []

        def lose(steps=steps, is_fed=is_fed):
            steps.append(engine.stats().num_prefill_tokens)
            if len(steps) in (1, 5, 6):
                with engine._held():
                    engine._core.batches[0].give_back()
                if not is_fed:
                    monkeypatch.setattr(FedRows, "of", lambda *args: (fed := of(*args)) and fed._replace(rows={}))

        found = model.generate(**call, logits_processor=LogitsProcessorList([Raising(lose)]))
        assert steps[1] > steps[0] and steps[5] > steps[4] and steps[6] > steps[5]
        assert torch.equal(found, expected) == is_fed
        assert_idle(model)


def test_beams_and_native_calls_with_equal_ids_and_other_images():
    """In any order, from blocks and snapshots that the calls before left."""
    model = seeing_model("qwen3.5")
    calls = [image_call(model, [row]) | {"max_new_tokens": 6} for row in (SEEN, OTHER)]
    assert torch.equal(calls[0]["input_ids"], calls[1]["input_ids"])
    expected = {(number, beams): stock_generate(model, **calls[number], num_beams=beams)
                for number in (0, 1) for beams in (1, 3)}
    assert not torch.equal(expected[0, 3], expected[1, 3])
    for order in ([(0, 1), (0, 3), (1, 3), (1, 1), (0, 1)], [(1, 3), (1, 1), (0, 1), (0, 3), (1, 1)]):
        hf_paged.enable(model, strict=True, block_size=16)
        for number, beams in order:
            assert_same_tensor(model.generate(**calls[number], num_beams=beams), expected[number, beams])
        assert_idle(model)
        hf_paged.disable(model)


def test_adapters_named_by_rows():
    """Of beams of equal prompts: a row is another one's only under the same adapter."""
    pytest.importorskip("peft", reason="an extra of the test environment")
    from lora_models import with_adapter

    model = seeing_model("qwen3.5")
    layers = [name for name, layer in model.named_modules() if "language_model" in name
              and name.endswith(("q_proj", "in_proj_qkv", "out_proj", "down_proj"))]
    wrapped = with_adapter(with_adapter(model, "one", 3, layers, scale=0.5), "two", 4, layers[:2], scale=0.5)
    call = image_call(model, [SEEN, SEEN, OTHER, [9], SEEN]) | {
        "max_new_tokens": 6, "adapter_names": ["one", "two", "one", "two", "__base__"]}
    others = call | {"adapter_names": ["two", "one", "two", "one", "one"]}
    jobs = [(call, 1), (call, 2), (others, 2), (others, 1), (call, 1)]
    expected = [wrapped.generate(**inputs, num_beams=beams) for inputs, beams in jobs]
    assert not torch.equal(expected[1], expected[2])
    hf_paged.enable(model, strict=True, block_size=16)
    for (inputs, beams), stocks in zip(jobs, expected, strict=True):
        assert_same_tensor(wrapped.generate(**inputs, num_beams=beams), stocks)
    assert_idle(model)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_returned_caches_are_stocks_own(options):
    """Pages hold no cache of such a model, and one made later would be of ids alone."""
    model = seeing_model("lfm2-vl")
    assert_falls_back(model, "keys and values of", **image_call(model, ONE), **options, max_new_tokens=6,
                      return_dict_in_generate=True)
