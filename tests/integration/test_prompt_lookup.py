"""`model.generate(prompt_lookup_num_tokens=...)`: stock's tokens, made by the engine in fewer steps."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    RecordingStreamer,
    assert_native_parity,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    left_padded,
    num_calls,
    random_prompts,
    stock_copy,
    stock_generate,
    tiny_model,
)
from threads import together
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

import hf_paged
from hf_paged.options import table

REPEATED = left_padded([random_prompts([5])[0] * 4])
LOOKUP = {"prompt_lookup_num_tokens": 5}


@pytest.fixture
def model():
    return hf_paged.enable(tiny_model(), strict=True)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=20)
@given(seed=st.integers(0, 5), prompt=st.lists(st.integers(1, 6), min_size=1, max_size=30),
       num_tokens=st.integers(1, 12), eos=st.sampled_from([None, [7, 30, 55, 90, 120, 160, 200, 230]]),
       penalty=st.sampled_from([None, 1.1]))
def test_greedy_tokens_are_stocks(seed, prompt, num_tokens, eos, penalty):
    """Random models over prompts of few words, so that guesses are right and wrong."""
    model = hf_paged.enable(tiny_model(seed), strict=True)
    assert_native_parity(model, **left_padded([prompt]), max_new_tokens=30, prompt_lookup_num_tokens=num_tokens,
                         eos_token_id=eos, repetition_penalty=penalty, do_sample=False)


def test_a_call_takes_fewer_steps_than_it_makes_tokens(model):
    engine = hf_paged.get_engine(model)
    model.generate(**REPEATED, max_new_tokens=40, **LOOKUP)
    before = engine.stats().num_steps
    assert_native_parity(model, **REPEATED, max_new_tokens=40, **LOOKUP)
    assert engine.stats().num_steps - before < 20  # it remembers what it made of the prompt
    assert num_calls(model) == {"native": 2}


def test_several_rows_which_stock_refuses_make_the_tokens_of_a_call_without(model):
    inputs = batch([30, 9, 21, 5])
    with pytest.raises(ValueError, match="batch_size = 1"):
        stock_copy(model).generate(**inputs, max_new_tokens=4, **LOOKUP)
    expected = stock_generate(model, **inputs, max_new_tokens=20)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=20, **LOOKUP), expected)


def test_sampled_tokens_are_those_without_guesses(model):
    drawn = []
    for options in ({}, LOOKUP, LOOKUP):
        torch.manual_seed(3)
        drawn.append(model.generate(**REPEATED, max_new_tokens=30, do_sample=True, temperature=0.5, **options))
    assert_same_tensor(drawn[1], drawn[0])
    assert_same_tensor(drawn[2], drawn[0])
    assert hf_paged.get_engine(model).stats().num_accepted_draft_tokens > 0
    assert num_calls(model) == {"native": 3}


def test_a_result_in_a_dict_and_a_stream_are_stocks(model):
    options = {**REPEATED, "max_new_tokens": 20, **LOOKUP}
    stock = stock_copy(model).generate(**options, return_dict_in_generate=True)
    made = model.generate(**options, return_dict_in_generate=True)
    assert type(made) is type(stock)
    assert_same_tensor(made.sequences, stock.sequences)
    assert made.past_key_values.get_seq_length() == stock.past_key_values.get_seq_length()
    for _ in range(2):  # the second with guesses that are right
        streamer = RecordingStreamer()
        model.generate(**options, streamer=streamer)
        [prompt], *columns = streamer.puts
        assert prompt + [token for column in columns for token in column] == stock.sequences[0].tolist()
        assert streamer.ended == 1


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("options", [
    {"stop_strings": "q"}, {"max_time": 100.0}, {"logits_processor": LogitsProcessorList([Own()])},
    {"output_scores": True, "return_dict_in_generate": True}, {"structured": {"regex": "[a-c]{20}"}},
], ids=lambda options: next(iter(options)))
def test_what_stock_looks_at_once_a_draft_runs_in_lockstep(model, options):
    call = {**REPEATED, "max_new_tokens": 20, **LOOKUP, **options}
    if options.keys() & {"stop_strings", "structured"}:
        call["tokenizer"] = byte_tokenizer()
    assert hf_paged.explain(model, **call).path == "lockstep"
    made = model.generate(**call)
    if "structured" in options:
        text = byte_tokenizer().decode(made[0, REPEATED["input_ids"].shape[1] :], skip_special_tokens=True)
        assert re.fullmatch("[a-c]{20}", text)
    else:
        expected = stock_copy(model).generate(**call)
        if "return_dict_in_generate" in options:
            made, expected = made.sequences, expected.sequences
        assert_same_tensor(made, expected)
    assert num_calls(model) == {"lockstep": 1}


# Of each option that stock's loop carries out, a value.
IN_LOCKSTEP = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "top_h": {"top_h": 0.5, "do_sample": True},
    "guidance_scale": {"guidance_scale": 1.7},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.0), "do_sample": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
}
# Natively in a dict; a search without drafts.
ELSEWHERE = {"return_dict_in_generate", "num_beams"}


def sequences(made):
    return made if isinstance(made, torch.Tensor) else made.sequences


def test_every_option_of_lockstep_is_among_these():
    assert IN_LOCKSTEP.keys() | ELSEWHERE == set(table.names(table.LOCKSTEP))


@pytest.mark.parametrize("name", IN_LOCKSTEP)
def test_one_row_in_lockstep_makes_what_stock_makes_with_its_drafts(model, name):
    call = {**REPEATED, "max_new_tokens": 12, **LOOKUP, **IN_LOCKSTEP[name]}
    torch.manual_seed(1)
    expected = stock_copy(model).generate(**call)
    torch.manual_seed(1)
    assert_same_tensor(sequences(model.generate(**call)), sequences(expected))
    assert num_calls(model) == {"lockstep": 1}


def test_drafts_change_the_tokens_of_stock_with_a_guidance_scale(model):
    """As docs/options.md says: the processor takes each draft's tokens for new ones."""
    call = {**REPEATED, "max_new_tokens": 12, **IN_LOCKSTEP["guidance_scale"]}
    assert not torch.equal(stock_generate(model, **call, **LOOKUP), stock_generate(model, **call))


@pytest.mark.parametrize("name", IN_LOCKSTEP)
def test_several_rows_in_lockstep_make_the_tokens_of_a_call_without(model, name):
    call = {**batch([30, 9, 21]), "max_new_tokens": 8, **IN_LOCKSTEP[name]}
    torch.manual_seed(1)
    expected = stock_copy(model).generate(**call)
    torch.manual_seed(1)
    streamer = RecordingStreamer()
    assert hf_paged.explain(model, **call, **LOOKUP).path == "lockstep"
    assert_same_tensor(sequences(model.generate(**call, **LOOKUP, streamer=streamer)), sequences(expected))
    assert (num_calls(model), streamer.ended) == ({"lockstep": 1}, 1)


@pytest.mark.parametrize("options", [{"stop_strings": "q"}, {"max_time": 100.0}], ids=["strings", "time"])
def test_several_rows_with_ends_of_their_own_are_native(model, options):
    call = {**batch([30, 9, 21]), "max_new_tokens": 12, "tokenizer": byte_tokenizer(), "eos_token_id": 7, **options}
    expected = stock_generate(model, **call)
    assert_same_tensor(model.generate(**call, **LOOKUP), expected)
    assert num_calls(model) == {"native": 1}


@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_several_rows_that_only_stock_could_run_raise_what_stock_raises():
    model = hf_paged.enable(tiny_model())
    with pytest.raises(ValueError, match="batch_size = 1"):
        model.generate(**batch([30, 9]), max_new_tokens=4, output_attentions=True, return_dict_in_generate=True,
                       **LOOKUP)


def test_rows_of_a_call_in_lockstep_join_steps_with_guesses(model):
    """Which stand in front of the guesses in the same steps."""
    beams, lookup = {**batch([12, 30]), "max_new_tokens": 40, "num_beams": 3}, {**REPEATED, "max_new_tokens": 80}
    expected = stock_generate(model, **beams), stock_generate(model, **lookup)
    model.generate(**lookup, **LOOKUP)
    for _ in range(3):
        made = together(lambda: model.generate(**beams), lambda: model.generate(**lookup, **LOOKUP))
        for one, other in zip(made, expected, strict=True):
            assert_same_tensor(one, other)
    assert hf_paged.get_engine(model).stats().num_accepted_draft_tokens > 0


@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
@pytest.mark.parametrize("options", [
    {"prompt_lookup_num_tokens": 0}, {"prompt_lookup_num_tokens": -1},
    {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1},
    {"prompt_lookup_num_tokens": 3, "use_cache": False},
])
def test_what_stock_refuses_is_refused(options):
    model = tiny_model()
    with pytest.raises((ValueError, RuntimeError)) as expected:
        stock_copy(model).generate(**REPEATED, max_new_tokens=4, **options)
    hf_paged.enable(model)
    with pytest.raises(expected.type) as raised:
        model.generate(**REPEATED, max_new_tokens=4, **options)
    assert (type(raised.value), str(raised.value)) == (expected.type, str(expected.value))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_generator_names_a_number_that_is_none(value, error):
    with hf_paged.PagedGenerator(tiny_model()) as generator, pytest.raises(error, match="prompt_lookup_num_tokens="):
        generator.generate([[1, 2, 3]], max_new_tokens=4, prompt_lookup_num_tokens=value)
