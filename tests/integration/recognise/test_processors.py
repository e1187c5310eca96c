"""transformers' own processors and criteria, given as objects: native wherever some config says the same."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    lent,
    stock_generate,
    tiny_model,
)
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

import hf_paged
from hf_paged.options import table

# Narrow weights: few tokens win, so that penalties and bans decide.
shared_model = functools.cache(lambda: tiny_model(4, initializer_range=0.05))
INPUTS = batch([20, 13, 5])
# The first tokens that stock makes of these; a test below checks them.
FREE = [[88, 31, 131, 162, 97], [167, 15, 254, 164, 254], [59, 137, 183, 6, 147]]
EOS = FREE[0][3]

NATIVE = [option for option in table.OPTIONS.values() if option.path == table.NATIVE]

model = lent(shared_model)


# -- processors ------------------------------------------

# For every class that can be read: how a caller makes one for prompts of 20 tokens.
GREEDY = {
    "SequenceBiasLogitsProcessor": lambda c: c([[[FREE[0][0]], -9.0], [[9, 11], 3.0]]),
    "RepetitionPenaltyLogitsProcessor": lambda c: c(1.5),
    "NoRepeatNGramLogitsProcessor": lambda c: c(1),
    "NoBadWordsLogitsProcessor": lambda c: c([[FREE[0][0]], FREE[0][1:3]]),
    "MinLengthLogitsProcessor": lambda c: c(29, EOS),
    "MinNewTokensLengthLogitsProcessor": lambda c: c(20, 9, [EOS]),
    "ForcedBOSTokenLogitsProcessor": lambda c: c(8),
    "ForcedEOSTokenLogitsProcessor": lambda c: c(32, [7, 9]),
    "InfNanRemoveLogitsProcessor": lambda c: c(),
    "ExponentialDecayLengthPenalty": lambda c: c((0, 4.0), EOS, 20),
    "SuppressTokensLogitsProcessor": lambda c: c([row[0] for row in FREE]),
    "SuppressTokensAtBeginLogitsProcessor": lambda c: c([row[0] for row in FREE], 20),
    "LogitNormalization": lambda c: c(),
}
SAMPLING = {
    "TemperatureLogitsWarper": (lambda c: c(0.3), {"temperature": 0.3}),
    "TopKLogitsWarper": (lambda c: c(3), {"top_k": 3}),
    "TopPLogitsWarper": (lambda c: c(0.4), {"top_p": 0.4}),
    "MinPLogitsWarper": (lambda c: c(0.3), {"min_p": 0.3}),
    "TypicalLogitsWarper": (lambda c: c(0.3), {"typical_p": 0.3}),
    "EpsilonLogitsWarper": (lambda c: c(0.02), {"epsilon_cutoff": 0.02}),
    "EtaLogitsWarper": (lambda c: c(0.3), {"eta_cutoff": 0.3}),
}
QUIET = ("ForcedBOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization")
NEEDS_EOS = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ExponentialDecayLengthPenalty")


def make(name):
    return (GREEDY | {key: value[0] for key, value in SAMPLING.items()})[name](getattr(processors, name))


def test_the_tokens_that_cases_name_are_stocks(model):
    assert stock_generate(model, **INPUTS, max_new_tokens=5)[:, 20:].tolist() == FREE


def test_every_class_that_stock_makes_for_a_native_option_is_read_and_tested_here():
    made = {option.made for option in NATIVE if getattr(option.made, "__module__", "") == processors.__name__}
    assert made == {option.made for option in NATIVE if option.of_processor is not None}
    assert {kind.__name__ for kind in made} == {*GREEDY, *SAMPLING}


def test_options_are_read_in_the_order_in_which_stock_applies_them():
    config = GenerationConfig(
        sequence_bias={(3,): 1.0}, repetition_penalty=1.1, no_repeat_ngram_size=2, bad_words_ids=[[4]], min_length=3,
        min_new_tokens=3, forced_bos_token_id=1, forced_eos_token_id=2, remove_invalid_values=True, max_length=30,
        exponential_decay_length_penalty=(1, 1.1), suppress_tokens=[5], begin_suppress_tokens=[6], do_sample=True,
        temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, typical_p=0.5, epsilon_cutoff=0.1, eta_cutoff=0.1,
        renormalize_logits=True, eos_token_id=9,
    )
    shared_model()._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    made = shared_model()._get_logits_processor(config, input_ids_seq_length=20, logits_processor=LogitsProcessorList())
    read = [option.made for option in NATIVE if option.of_processor is not None]
    assert [type(processor) for processor in made] == read


@pytest.mark.parametrize(("lengths", "kind"), [([20], list), ([20, 13, 5], LogitsProcessorList)],
                         ids=["one row", "ragged"])
@pytest.mark.parametrize("name", GREEDY)
def test_a_processor_alone_gives_stocks_tokens_natively(model, native_only, name, lengths, kind):
    inputs = batch(lengths)
    if name == "NoRepeatNGramLogitsProcessor":  # with padding its n-grams count
        inputs = batch([20] * len(lengths))
    kwargs = {**inputs, "max_new_tokens": 12} | ({"eos_token_id": EOS} if name in NEEDS_EOS else {})
    expected = stock_generate(model, **kwargs, logits_processor=kind([make(name)]))
    if name not in QUIET:
        plain = stock_generate(model, **kwargs)
        assert plain.shape != expected.shape or not torch.equal(plain, expected), "the processor has no effect"
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **kwargs, logits_processor=kind([make(name)]))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_warper_draws_what_its_option_draws(model, native_only, name):
    hf_paged.enable(model, strict=True, seed=5)
    kwargs = {**INPUTS, "max_new_tokens": 12, "do_sample": True}
    off = {"top_k": 0}
    as_option = model.generate(**kwargs, **(off | SAMPLING[name][1]))
    as_object = model.generate(**kwargs, **off, logits_processor=[make(name)])
    assert_same_tensor(as_object, as_option)
    assert not torch.equal(as_object, model.generate(**kwargs, **off)), "the warper has no effect"


NATIVE_TOGETHER = {
    "bans in any order": {"suppress_tokens": [row[0] for row in FREE], "logits_processor": [
        processors.RepetitionPenaltyLogitsProcessor(1.3), processors.NoBadWordsLogitsProcessor([[3], [5, 7]])]},
    "a bias after a ban": {"bad_words_ids": [[FREE[1][0]]], "logits_processor": [
        processors.SequenceBiasLogitsProcessor({(FREE[0][0],): -3.0})]},
    "in place of the option's": {"repetition_penalty": 1.1, "logits_processor": [
        processors.RepetitionPenaltyLogitsProcessor(1.9)]},
    "a minimum for criteria of one's own": {
        "logits_processor": [processors.MinNewTokensLengthLogitsProcessor(20, 7, EOS)],
        "stopping_criteria": [EosTokenCriteria(EOS)]},
    "two minima": {"min_new_tokens": 3, "eos_token_id": EOS, "logits_processor": [
        processors.MinLengthLogitsProcessor(29, EOS)]},
    "a forced end at the criterion's length": {
        "logits_processor": [processors.ForcedEOSTokenLogitsProcessor(26, 7)],
        "stopping_criteria": [MaxLengthCriteria(26)]},
}


@pytest.mark.parametrize("name", NATIVE_TOGETHER)
def test_objects_together_natively(model, native_only, name):
    kwargs = {**INPUTS, "max_new_tokens": 12} | NATIVE_TOGETHER[name]
    expected = stock_generate(model, **kwargs)
    hf_paged.enable(model, strict=True)
    assert_same_tensor(model.generate(**kwargs), expected)


class OwnPenalty(processors.RepetitionPenaltyLogitsProcessor):
    pass


class OwnEos(EosTokenCriteria):
    pass


NOT_NATIVE = {
    "a subclass": {"logits_processor": [OwnPenalty(1.5)]},
    "a subclass of a criterion": {"stopping_criteria": [OwnEos(EOS)]},
    "a penalty before a bias": {"repetition_penalty": 1.5, "logits_processor": [
        processors.SequenceBiasLogitsProcessor({(FREE[0][0],): -3.0})]},
    "two of a kind": {"logits_processor": [processors.RepetitionPenaltyLogitsProcessor(1.2),
                                           processors.RepetitionPenaltyLogitsProcessor(1.3)]},
    "two temperatures": {"do_sample": True, "temperature": 0.7, "logits_processor": [
        processors.TemperatureLogitsWarper(0.5)]},
    "a temperature after top-k": {"do_sample": True, "top_k": 0, "logits_processor": [
        processors.TopKLogitsWarper(5), processors.TemperatureLogitsWarper(0.5)]},
    "top-p before top-k": {"do_sample": True, "top_k": 5, "logits_processor": [processors.TopPLogitsWarper(0.5)]},
    "a warper in greedy search": {"logits_processor": [processors.TemperatureLogitsWarper(0.5)]},
    "a ban after invalid values": {"logits_processor": [
        processors.InfNanRemoveLogitsProcessor(), processors.NoBadWordsLogitsProcessor([[FREE[0][0]]])]},
    "a ban of the decaying end": {"eos_token_id": EOS, "exponential_decay_length_penalty": (2, 1.9),
                                  "logits_processor": [processors.NoRepeatNGramLogitsProcessor(3)]},
    "infinite bias after a ban": {"suppress_tokens": [3], "logits_processor": [
        processors.SequenceBiasLogitsProcessor({(3, 4): float("-inf")})]},
    "a penalty without the prompt": {"logits_processor": [
        processors.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=20)]},
    "bans from another length on": {"logits_processor": [
        processors.SuppressTokensAtBeginLogitsProcessor([row[2] for row in FREE], 22)]},
    "a forced end at another length": {"logits_processor": [processors.ForcedEOSTokenLogitsProcessor(26, 7)]},
    "a minimum of another end": {"eos_token_id": EOS, "logits_processor": [
        processors.MinNewTokensLengthLogitsProcessor(20, 6, [EOS + 1])]},
    "two stop strings": {"eos_token_id": 255, "stopping_criteria": [
        StopStringCriteria(byte_tokenizer(), ["ab"]), StopStringCriteria(byte_tokenizer(), ["cd"])]},
}


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_what_no_config_says_is_left_to_stocks_loop(model, name, monkeypatch):
    assert_lockstep(model, **INPUTS, max_new_tokens=12, **NOT_NATIVE[name])
    monkeypatch.setattr("hf_paged.integration.generate.run_or_fall_back", lambda *args: "not native")
    assert model.generate(**INPUTS, max_new_tokens=12, **NOT_NATIVE[name]) == "not native"


def test_a_patched_class_is_left_to_stocks_loop(model, monkeypatch):
    monkeypatch.setattr(processors.SuppressTokensLogitsProcessor, "__call__", lambda self, ids, scores: -scores)
    assert_lockstep(model, **INPUTS, max_new_tokens=6,
                    logits_processor=[processors.SuppressTokensLogitsProcessor([3])])


OPTIONS = {
    "sequence_bias": {(FREE[0][0],): -2.0}, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[FREE[0][1]]], "min_new_tokens": 5, "forced_eos_token_id": 7,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (3, 1.3),
    "suppress_tokens": [FREE[0][2]], "begin_suppress_tokens": [FREE[1][0]],
}


@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")  # a decay of a banned token is NaN
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_objects_in_any_order_beside_any_options(data):
    """Natively or in lockstep, but stock's tokens: what is native must be what stock's loop would do."""
    names = data.draw(st.lists(st.sampled_from(sorted(set(GREEDY) - {"LogitNormalization"})), max_size=4))
    options = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=3))
    kwargs = {**batch(data.draw(st.sampled_from([[20], [20, 20], [20, 13, 5]]))), "max_new_tokens": 12}
    kwargs |= {name: OPTIONS[name] for name in options} | {"logits_processor": [make(name) for name in names]}
    if data.draw(st.booleans()):
        kwargs["stopping_criteria"] = [EosTokenCriteria(EOS)]
    if data.draw(st.booleans()):
        kwargs["eos_token_id"] = data.draw(st.sampled_from([EOS, EOS + 1, [EOS + 1, EOS]]))
    if "exponential_decay_length_penalty" in kwargs:
        kwargs.setdefault("eos_token_id", EOS)
    expected = stock_generate(shared_model(), **kwargs)
    hf_paged.enable(shared_model())
    try:
        assert_same_tensor(shared_model().generate(**kwargs), expected)
    finally:
        hf_paged.disable(shared_model())



# -- criteria ------------------------------------------

TEXT = next(t for t in map(byte_tokenizer().decode, FREE[0]) if t.isascii() and t.isprintable())
CRITERIA = {
    "an EOS": [EosTokenCriteria(EOS)],
    "two of them": [EosTokenCriteria(EOS), EosTokenCriteria([FREE[1][2]])],
    "a tensor of them": [EosTokenCriteria(torch.tensor([EOS, FREE[2][1]]))],
    "a shorter length": [MaxLengthCriteria(25)],
    "a longer length": [MaxLengthCriteria(40)],
    "two lengths": [MaxLengthCriteria(30), MaxLengthCriteria(24)],
    "a length below the prompt": [MaxLengthCriteria(3)],
    "no time": [MaxTimeCriteria(0.0, initial_timestamp=1.0), EosTokenCriteria(EOS)],
    "time enough": [MaxTimeCriteria(1e4), EosTokenCriteria(EOS)],
    "the shorter of two times": [MaxTimeCriteria(1e4), MaxTimeCriteria(0.0, initial_timestamp=1.0),
                                 EosTokenCriteria(255)],
    "a stop string": [StopStringCriteria(byte_tokenizer(), [TEXT]), EosTokenCriteria(255)],
    "all together": [StopStringCriteria(byte_tokenizer(), [TEXT, "xyz"]), MaxTimeCriteria(1e4), MaxLengthCriteria(27),
                     EosTokenCriteria(EOS)],
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [list, StoppingCriteriaList])
@pytest.mark.parametrize("eos", [None, FREE[1][4]])
@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_give_stocks_tokens_natively(model, native_only, name, eos, kind):
    kwargs = {**INPUTS, "max_new_tokens": 12, "eos_token_id": eos}
    expected = stock_generate(model, **kwargs, stopping_criteria=kind(CRITERIA[name]))
    if name != "time enough" or eos is None:
        plain = stock_generate(model, **kwargs)
        assert plain.shape != expected.shape or not torch.equal(plain, expected), "the criteria have no effect"
    hf_paged.enable(model, strict=True)
    assert_same_tensor(model.generate(**kwargs, stopping_criteria=kind(CRITERIA[name])), expected)


def test_criteria_of_a_subset_of_classes_in_random_company(model):
    """Every mix of known criteria, natively or in lockstep, ends where stock ends."""
    rng = random.Random(0)
    hf_paged.enable(model, strict=True)
    known = [criterion for listed in CRITERIA.values() for criterion in listed]
    for _ in range(12):
        chosen = rng.sample(known, rng.randint(1, 4))
        kwargs = {**INPUTS, "max_new_tokens": 12, "eos_token_id": rng.choice([None, EOS, FREE[1][4]])}
        expected = stock_generate(model, **kwargs, stopping_criteria=chosen)
        assert_same_tensor(model.generate(**kwargs, stopping_criteria=chosen), expected)


def test_an_end_without_a_token_to_pad_with_raises_as_in_stock():
    model = tiny_model(pad_token_id=None)
    kwargs = {**batch([20, 20]), "max_new_tokens": 4, "stopping_criteria": [EosTokenCriteria(3)]}
    with pytest.raises(TypeError) as stock:
        model.generate(**kwargs)
    hf_paged.enable(model, strict=True)
    with pytest.raises(TypeError) as ours:
        model.generate(**kwargs)
    assert str(ours.value) == str(stock.value)
