"""Stock's loop over models with a recurrent state: beams, scores and processors have stock's tokens and numbers."""

from __future__ import annotations

import invariants
import pytest
import torch
from recurrent_models import CLASSES, outlined, recurrent_model, with_idiom
from support import (
    assert_close_steps,
    assert_falls_back,
    assert_idle,
    assert_lockstep,
    assert_same_tensor,
    batch,
    num_calls,
    random_prompts,
    run_out,
    stock_copy,
    stock_generate,
)
from threads import rows_of
from transformers import GenerationConfig, LogitsProcessorList

import hf_paged
from hf_paged.engine import engine as engine_file
from hf_paged.engine.features.lockstep import LockstepThrottle

pytestmark = with_idiom

CORE = ("Lfm2", "Mamba2", "Jamba")  # the last one computes whole prompts
FAMILIES = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in CLASSES]
EACH = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "Qwen3_5" else name
                                        for name in (*CORE, "Qwen3_5")])
STEPS = {"max_num_batched_tokens": 19, "max_num_seqs": 2}
INPUTS = batch([30, 17, 1])
OPTIONS = {"max_new_tokens": 7}


def without_last(input_ids, scores):
    """A processor of the caller's own."""
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def own(function=without_last):
    return LogitsProcessorList([function])


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_have_stocks_numbers(name):
    """Prompts in chunks; more rows than the engine has slots for; equal rows, which are computed once."""
    model = outlined(recurrent_model(name))
    assert_lockstep(model, paged=STEPS, **INPUTS, **OPTIONS, num_beams=3)
    assert hf_paged.get_engine(model)._core.runner.cache.states.num_slots >= 9
    assert_lockstep(model, paged=STEPS, **INPUTS, **OPTIONS, logits_processor=own(), num_return_sequences=2,
                    do_sample=True, return_dict_in_generate=True, output_logits=True)
    assert num_calls(model) == {"lockstep": 1}


@EACH
@pytest.mark.parametrize("overlap", [False, True])
def test_beside_native_requests(name, overlap, monkeypatch):
    """Beams join the steps of a running request, and take the slot of one whose states are still to be saved."""
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)
    model = outlined(recurrent_model(name))
    running, ended = random_prompts([20, 18], seed=8)
    of_running, of_ended, beams = (
        stock_generate(model, input_ids=torch.tensor([running]), max_new_tokens=14)[0, 20:].tolist(),
        stock_generate(model, input_ids=torch.tensor([ended]), max_new_tokens=2),
        stock_generate(model, **INPUTS, **OPTIONS, num_beams=3))
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=overlap, **STEPS))
    assert_same_tensor(model.generate(torch.tensor([ended]), max_new_tokens=2), of_ended)
    engine.add_request(running, GenerationConfig(max_new_tokens=14))
    tokens = [token for _ in range(3) for output in engine.step() for token in output.new_token_ids]
    assert_same_tensor(model.generate(torch.tensor([ended]), max_new_tokens=2), of_ended)
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, num_beams=3), beams)
    invariants.check(engine._core.scheduler)
    tokens += [token for output in run_out(engine) for token in output.new_token_ids]
    assert tokens == of_running
    hits = engine.stats().prefix_cache_hits
    longer = torch.cat([of_ended, torch.tensor([[7]])], 1)
    assert_same_tensor(model.generate(longer, max_new_tokens=4), stock_generate(model, input_ids=longer,
                                                                                max_new_tokens=4))
    assert engine.stats().prefix_cache_hits > hits or name == "Jamba"
    assert_idle(model)


def test_states_of_an_ended_request_are_saved_before_beams_take_its_slot():
    model = outlined(recurrent_model("Lfm2"))
    prompt, = random_prompts([18], seed=8)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, **STEPS))
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=3)
    model.generate(**INPUTS, **OPTIONS, num_beams=3)
    longer = torch.cat([answer, torch.tensor([[7]])], 1)
    found = model.generate(longer, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    native = model.generate(longer, max_new_tokens=4)
    assert engine.stats().prefix_cache_hits == longer.shape[1] - 2
    stock = stock_generate(model, input_ids=longer, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    assert_same_tensor(native, stock.sequences)
    assert_close_steps(found.logits, stock.logits)


@EACH
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_that_lose_their_slots_are_computed_again(name, beams):
    model = outlined(recurrent_model(name))
    options = OPTIONS | {"num_beams": beams}
    stock = stock_generate(model, **INPUTS, **options, logits_processor=own())
    engine, calls = hf_paged.get_engine(hf_paged.enable(model, strict=True, **STEPS)), []

    def lose(input_ids, scores):
        calls.append(len(input_ids))
        if len(calls) in (1, 4):
            engine._core.batches[0].give_back()
            for tensor in engine._core.runner.cache.states._tensors.values():
                tensor.fill_(float("nan"))
        return without_last(input_ids, scores)

    assert_same_tensor(model.generate(**INPUTS, **options, logits_processor=own(lose)), stock)
    assert len(calls) == 7


def test_tokens_that_are_taken_back():
    model = outlined(recurrent_model("Lfm2"))
    engine = hf_paged.get_engine(hf_paged.enable(model))
    prompts = random_prompts([20, 7])
    with engine.lockstep(rows_of(prompts, 5)) as rows:
        rows.prompts()
        rows.decode(torch.tensor([[3], [5]]))
        rows.crop(1)
        found = rows.decode(torch.tensor([[4, 8], [6, 9]]))
    for row, (prompt, tokens) in enumerate(zip(prompts, ([4, 8], [6, 9]), strict=True)):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -2:]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=0)
    assert_idle(model)


@pytest.mark.parametrize("is_beside_requests", [False, True])
def test_weights_that_change_in_a_call(is_beside_requests):
    """As in stock: later tokens by the new weights, behind the states of the old ones."""
    def run(model):
        calls = []

        def change(input_ids, scores):
            calls.append(len(input_ids))
            if len(calls) == 3:
                model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.flip(0))
            return without_last(input_ids, scores)

        return model.generate(**INPUTS, **OPTIONS, logits_processor=own(change), return_dict_in_generate=True,
                              output_logits=True)

    model = outlined(recurrent_model("Lfm2"))
    stock = stock_copy(model)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    if is_beside_requests:
        engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=20))
    assert_close_steps(run(model).logits, run(stock).logits)
    run_out(engine)
    assert_idle(model)


def test_no_step_is_computed_twice_where_the_model_changed(monkeypatch):
    model = outlined(recurrent_model("Lfm2"))
    options = OPTIONS | {"return_dict_in_generate": True, "output_logits": True}
    stock = stock_generate(model, **INPUTS, **options)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    found = iter([False, False, False, True])
    monkeypatch.setattr(engine._core, "model_changed", lambda: next(found, False))
    assert_close_steps(model.generate(**INPUTS, **options).logits, stock.logits)
    assert next(found, None) is None


def test_more_rows_than_have_states_and_drafts_go_to_stock(monkeypatch):
    model = outlined(recurrent_model("Lfm2"))
    assert_falls_back(model, "nothing takes back out of recurrent states", **batch([9]), max_new_tokens=3,
                      prompt_lookup_num_tokens=2, logits_processor=own())
    monkeypatch.setattr(engine_file, "most_rows", lambda executor, config: 5)
    assert_falls_back(model, "recurrent states of 5 have room", **INPUTS, **OPTIONS, num_beams=2)
