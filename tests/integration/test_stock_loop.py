"""Calls that only stock's decoding loop can carry out run over the engine's forwards and give stock's very output."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import QUIET, VALUES
from support import (
    RecordingStreamer,
    Until,
    assert_close_steps,
    assert_idle,
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    left_padded,
    lent,
    random_prompts,
    stock_copy,
    stock_generate,
    tiny_model,
)
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_paged

pytestmark = pytest.mark.usefixtures("lockstep_only")

shared_model = functools.cache(tiny_model)
INPUTS = batch([20, 13, 5])
EOS = 172  # what stock makes of the first row as fifth token
free = functools.cache(lambda: stock_generate(shared_model(), **INPUTS, max_new_tokens=20)[:, 20:])

model = lent(shared_model)


class Recording(LogitsProcessor):
    """Keeps what it was shown and what it is told to keep to itself: state that stock's loop must drive as always."""

    def __init__(self, raise_at=None):
        self.ids, self.scores, self.objects, self.raise_at = [], [], [], raise_at

    def __call__(self, input_ids, scores):
        if len(self.ids) == self.raise_at:
            raise KeyError("enough")
        self.objects.append(input_ids)
        self.ids.append(input_ids.clone())
        self.scores.append(scores.clone())
        # Depends on the number of calls: skipping or repeating one changes tokens.
        scores[:, (7 * len(self.ids)) % scores.shape[1]] += 100.0
        return scores


@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_of_the_callers_own_sees_what_stock_shows(model, eos, do_sample):
    seen = []

    def call(model, **kwargs):
        seen.append(Recording())
        return model.generate(logits_processor=LogitsProcessorList([seen[-1]]), **kwargs)

    assert_lockstep(model, call=call, **INPUTS, max_new_tokens=12, eos_token_id=eos, do_sample=do_sample)
    stock, ours = seen
    assert len(ours.ids) == len(stock.ids)
    for a, b in zip(ours.ids, stock.ids, strict=True):
        assert_same_tensor(a, b)
    assert all(scores.dtype is torch.float32 for scores in ours.scores)
    assert_close_steps(tuple(ours.scores), tuple(stock.scores))
    assert len({id(ids) for ids in ours.objects}) == len(ours.objects)


@pytest.mark.parametrize("eos", [None, EOS])
def test_stopping_criteria_of_the_callers_own(model, eos):
    """Without an EOS, finished rows go on making real tokens until all are done; with one they get padding."""
    criteria = StoppingCriteriaList([Until(24)])
    output = assert_lockstep(model, **INPUTS, max_new_tokens=12, eos_token_id=eos, stopping_criteria=criteria)
    assert output.shape[1] == 26
    assert (eos is not None) == bool((output[0, 24:] == 0).all())


def _allowed(row, ids):
    return [3 + row, 40 + len(ids) % 5, int(ids[-1])]


# What a row of the table of options does not say; tests/options/test_every_option.py has the others.
ALONE = {
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": _allowed},
    "typical_p that leaves a choice": {"typical_p": 0.3, "do_sample": True},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3]), "do_sample": True},
    "min_length beside": {"min_new_tokens": 9, "eos_token_id": EOS, "repetition_penalty": 1.2},
    "num_return_sequences": {"num_return_sequences": 3, "do_sample": True, "repetition_penalty": 1.2},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True},
    "a dict": {"return_dict_in_generate": True, "eos_token_id": EOS},
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_option_alone(model, name):
    assert free()[0, 4] == EOS
    assert_lockstep(model, **INPUTS, **({"max_new_tokens": 12} | ALONE[name]))


COMBINED = [
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "renormalize_logits",
    "suppress_tokens", "guidance_scale", "prefix_allowed_tokens_fn", "max_time", "scores", "forced_eos_token_id",
]
LENGTHS = {"one row": [17], "full blocks": [32, 16, 32, 48], "eight rows": [1, 20, 13, 20, 16, 5, 31, 9]}


@pytest.mark.slow
@settings(max_examples=15)
@given(
    names=st.lists(st.sampled_from(COMBINED), min_size=1, max_size=4, unique=True),
    lengths=st.sampled_from(sorted(LENGTHS)),
    sampled=st.booleans(),
    eos=st.booleans(),
    tiny_budget=st.booleans(),
    tiny_pool=st.booleans(),
    caching=st.booleans(),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_options_together(names, lengths, sampled, eos, tiny_budget, tiny_pool, caching):
    values = VALUES | QUIET | ALONE
    options = {key: value for name in names for key, value in values[name].items()} | {"do_sample": sampled}
    if eos:
        options |= {"eos_token_id": [EOS, 9, 10, 11]}
    paged = {"enable_prefix_caching": caching, "strict": True}
    if tiny_budget:
        paged |= {"max_num_seqs": 8, "max_num_batched_tokens": 11}
    if tiny_pool:  # the last of them does not fit: stock, said so
        paged |= {"num_blocks": 25}
    try:
        assert_lockstep(shared_model(), **batch(LENGTHS[lengths]), max_new_tokens=14, paged=paged, **options)
    finally:
        hf_paged.disable(shared_model())


def test_sampling_draws_from_torchs_generator_as_stock_does(model):
    """Two calls in a row after one seed: the second goes on where the first left the generator."""

    def call(model, **kwargs):
        return torch.cat([model.generate(**kwargs), model.generate(**kwargs)])

    output = assert_lockstep(model, call=call, **INPUTS, max_new_tokens=8, do_sample=True, repetition_penalty=1.1)
    assert not torch.equal(output[:3], output[3:])


def test_a_config_seed_makes_calls_equal_and_leaves_torchs_generator_alone(model):
    hf_paged.enable(model, strict=True, seed=5)
    before = torch.get_rng_state()
    a, b = (model.generate(**INPUTS, max_new_tokens=8, do_sample=True, repetition_penalty=1.1) for _ in range(2))
    assert_same_tensor(a, b)
    assert torch.equal(torch.get_rng_state(), before)
    hf_paged.enable(model, strict=True, seed=6)
    other = model.generate(**INPUTS, max_new_tokens=8, do_sample=True, repetition_penalty=1.1)
    assert not torch.equal(other, a)


@pytest.mark.parametrize("eos", [None, EOS])
def test_a_streamer_is_called_as_by_stock(model, eos):
    streamers = []

    def call(model, **kwargs):
        streamers.append(RecordingStreamer())
        return model.generate(streamer=streamers[-1], **kwargs)

    assert_lockstep(model, call=call, **INPUTS, max_new_tokens=9, eos_token_id=eos, repetition_penalty=1.2)
    assert streamers[0].puts == streamers[1].puts
    assert streamers[0].ended == streamers[1].ended == 1


# -- what return_dict_in_generate returns ------------------------------------------


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("lengths", [[20], [20, 13, 5]])
def test_the_returned_cache_is_stocks_and_can_be_continued(window, lengths):
    overrides = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model, inputs = tiny_model(**overrides), batch(lengths)
    expected = model.generate(**inputs, max_new_tokens=9, return_dict_in_generate=True)
    actual = assert_lockstep(model, **inputs, max_new_tokens=9, return_dict_in_generate=True)
    cache = actual.past_key_values
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
    for ours, stocks in zip(cache.layers, expected.past_key_values.layers, strict=True):
        assert type(ours) is type(stocks)
        assert ours.keys.shape == stocks.keys.shape and ours.values.dtype == stocks.values.dtype
        real = stocks.keys.shape[2]
        for row, prompt in enumerate(lengths):  # under the padding there are zeros
            first = max(0, max(lengths) - prompt - (cache.get_seq_length() - real))
            assert torch.allclose(ours.keys[row, :, first:], stocks.keys[row, :, first:], atol=1e-4)
            assert torch.allclose(ours.values[row, :, first:], stocks.values[row, :, first:], atol=1e-4)
    stock = stock_copy(model)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 9, dtype=torch.int64)], dim=1)
    ends = [
        stock.generate(input_ids=result.sequences, attention_mask=mask, past_key_values=copy.deepcopy(
            result.past_key_values), max_new_tokens=7)
        for result in (expected, actual)
    ]
    assert_same_tensor(ends[1], ends[0])


def test_without_a_dict_scores_are_not_kept(model):
    assert isinstance(assert_lockstep(model, **INPUTS, max_new_tokens=4, output_scores=True), torch.Tensor)


# -- prompt lookup ------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("length", [1, 16, 20, 33])
def test_prompt_lookup(model, eos, length):
    """A prompt that repeats itself, so that drafts are taken and refused."""
    prompt = (random_prompts([5]) * 8)[:8]
    inputs = left_padded([[t for part in prompt for t in part][:length]])
    assert_lockstep(model, **inputs, max_new_tokens=24, prompt_lookup_num_tokens=4, eos_token_id=eos)
    result = assert_lockstep(
        model, **inputs, max_new_tokens=24, prompt_lookup_num_tokens=4, max_matching_ngram_size=1,
        return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.05,
    )
    stock = stock_copy(model).generate(
        **inputs, max_new_tokens=24, prompt_lookup_num_tokens=4, max_matching_ngram_size=1,
        return_dict_in_generate=True, repetition_penalty=1.05,
    )
    assert result.past_key_values.get_seq_length() == stock.past_key_values.get_seq_length()


# -- the engine around it ------------------------------------------


def test_a_prompt_that_continues_the_answer_hits_what_lockstep_cached(model):
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    first = model.generate(**batch([20]), max_new_tokens=30, repetition_penalty=1.2)
    longer = torch.cat([first, torch.tensor(random_prompts([4], seed=9))], dim=1)
    before = engine.stats().prefix_cache_hits
    again = model.generate(input_ids=longer, max_new_tokens=6, repetition_penalty=1.2)
    assert engine.stats().prefix_cache_hits - before == 48
    assert_same_tensor(again, stock_generate(model, input_ids=longer, max_new_tokens=6, repetition_penalty=1.2))
    assert_native_parity(model, input_ids=longer, max_new_tokens=6)
    assert engine.stats().prefix_cache_hits - before == 48 + 48


def test_equal_rows_are_computed_once(model):
    hf_paged.enable(model, strict=True, enable_prefix_caching=False)
    model.generate(**batch([20]), max_new_tokens=3, num_return_sequences=4, do_sample=True, repetition_penalty=1.2)
    assert hf_paged.get_engine(model).stats().num_prefill_tokens == 20


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_processor_that_raises(model, at):
    hf_paged.enable(model, strict=True)
    with pytest.raises(KeyError, match="enough"):
        model.generate(**INPUTS, max_new_tokens=12, logits_processor=LogitsProcessorList([Recording(raise_at=at)]))
    assert_idle(model)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    assert_lockstep(model, **INPUTS, max_new_tokens=12, repetition_penalty=1.3)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["native", "beams"])
def test_generate_called_by_a_processor_runs_on_the_engine_too(model, options):
    inner = []

    class Nested(LogitsProcessor):
        def __call__(self, input_ids, scores):
            inner.append(model.generate(**batch([9]), max_new_tokens=3, **options))
            return scores

    expected = stock_generate(model, **batch([9]), max_new_tokens=3, **options)
    hf_paged.enable(model, strict=True)
    output = model.generate(**INPUTS, max_new_tokens=3, logits_processor=LogitsProcessorList([Nested()]))
    assert_same_tensor(output[:, 20:], free()[:, :3])
    assert len(inner) == 3
    assert all(torch.equal(tokens, expected) for tokens in inner)
    assert_idle(model)


def test_a_plain_forward_in_the_middle_is_stocks(model):
    class Looking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, input_ids.shape[1] - 20, dtype=torch.int64)], 1)
            return model(input_ids=input_ids, attention_mask=mask).logits[:, -1].float() + 0 * scores

    hf_paged.enable(model, strict=True)
    output = model.generate(**INPUTS, max_new_tokens=4, logits_processor=LogitsProcessorList([Looking()]))
    assert output.shape == (3, 24)


def test_rows_that_do_not_fit_go_to_stock_before_anything_ran(model):
    hf_paged.enable(model, num_blocks=5)
    expected = stock_generate(model, **INPUTS, max_new_tokens=12, repetition_penalty=1.2)
    seen = Recording()
    with pytest.warns(hf_paged.FallbackWarning, match="5 blocks.* holds 4"):
        output = model.generate(**INPUTS, max_new_tokens=12, repetition_penalty=1.2)
    assert_same_tensor(output, expected)
    model.generate(**INPUTS, max_new_tokens=12, logits_processor=LogitsProcessorList([seen]))
    assert len(seen.ids) == 12
    assert [calls.num_calls for calls in hf_paged.get_engine(model).stats().calls.values()] == [0, 0, 2]
    assert_idle(model)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 0


@pytest.mark.parametrize("beams", [1, 4])
def test_more_rows_than_max_num_seqs_get_slots_of_their_own(model, beams):
    expected = stock_generate(model, **INPUTS, max_new_tokens=12, num_beams=beams)
    hf_paged.enable(model, max_num_seqs=2, strict=True)
    for _ in range(2):
        assert_same_tensor(model.generate(**INPUTS, max_new_tokens=12, num_beams=beams), expected)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    scheduler = hf_paged.get_engine(model)._core.scheduler
    assert scheduler.num_free_slots == 2 + 3 * beams  # grown once
    assert_idle(model)


def test_the_pool_grows_in_the_middle(model):
    inputs = batch([100] * 6)
    assert_lockstep(model, **inputs, max_new_tokens=120, no_repeat_ngram_size=3)
    assert hf_paged.get_engine(model).stats().num_pool_growths > 0


def test_under_inference_mode_and_on_a_used_pool(model):
    hf_paged.enable(model, strict=True)
    with torch.inference_mode():
        first = model.generate(**INPUTS, max_new_tokens=8, repetition_penalty=1.2)
    second = model.generate(**INPUTS, max_new_tokens=8, repetition_penalty=1.2)
    assert_same_tensor(first.clone(), second)
    assert_same_tensor(second, stock_generate(model, **INPUTS, max_new_tokens=8, repetition_penalty=1.2))


def test_changed_weights_are_not_served_from_the_cache():
    model = tiny_model()
    assert_lockstep(model, **INPUTS, max_new_tokens=8, repetition_penalty=1.2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(0.02 * torch.randn(parameter.shape))  # leaves no trace in `_version`
    expected = stock_generate(model, **INPUTS, max_new_tokens=8, repetition_penalty=1.2)
    assert_same_tensor(model.generate(**INPUTS, max_new_tokens=8, repetition_penalty=1.2), expected)


def test_a_compiled_enabled_model_still_has_its_plain_forward():
    """The paged call is looked up on the class: torch.compile traces through it without a break."""
    model = hf_paged.enable(tiny_model(), strict=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = INPUTS["input_ids"]
    assert torch.allclose(compiled(input_ids=ids).logits, stock_copy(model)(input_ids=ids).logits, atol=1e-5)


def test_nan_ends_as_in_stock():
    """Greedy: the index that argmax gives; sampled: multinomial's error, after which the engine goes on."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[17] = float("nan")
    assert_lockstep(model, **INPUTS, max_new_tokens=4, no_repeat_ngram_size=2)
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**INPUTS, max_new_tokens=4, no_repeat_ngram_size=2, do_sample=True)
    assert_idle(model)


def test_disabling_in_the_middle_waits_for_the_end(model):
    class Disabling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            hf_paged.disable(model)
            return scores

    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model.generate(**INPUTS, max_new_tokens=5, logits_processor=LogitsProcessorList([Disabling()]))
    assert_same_tensor(output[:, 20:], free()[:, :5])
    assert engine.stats().kv_cache_bytes == 0
    assert_same_tensor(model.generate(**INPUTS, max_new_tokens=5)[:, 20:], free()[:, :5])
