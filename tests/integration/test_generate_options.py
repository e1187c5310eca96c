"""Options that edit logits or end rows, natively: stock's tokens, alone and in combination (CPU, fp32, strict)."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from option_cases import VALUES
from support import (
    RecordingStreamer,
    assert_idle,
    assert_native_parity,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    random_prompts,
    run_out,
    stock_generate,
    tiny_model,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged.options import table
from hf_paged.sampling import edits
from hf_paged.sampling.edit_lines import SharedLines
from hf_paged.sampling.edits import EditState

# Narrow weights: few tokens win, so that penalties and bans decide often.
NARROW = {"initializer_range": 0.05}


def enabled(**paged):
    return hf_paged.enable(tiny_model(4, **NARROW), strict=True, **paged)


def first_tokens(model, inputs, count=4):
    width = inputs["input_ids"].shape[1]
    return stock_generate(model, **inputs, max_new_tokens=count)[:, width:]


def test_forced_bos_only_after_a_prompt_of_one_token():
    model = enabled()
    assert_native_parity(model, input_ids=torch.tensor([[5], [9]]), max_new_tokens=5, forced_bos_token_id=8)
    assert_native_parity(model, **batch([5, 1]), max_new_tokens=5, forced_bos_token_id=8)


def test_left_padding_counts_as_seen_where_stock_counts_it():
    """5.17 penalises the pad token, 5.23 does not: a bias makes it the winner, so that the difference shows."""
    kwargs = {"repetition_penalty": 3.0, "sequence_bias": {(0,): 1.5}, "max_new_tokens": 8}
    assert_native_parity(enabled(), **batch([30, 6, 2]), **kwargs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_of_the_left_padding_are_banned_as_in_stock(size):
    """The pad token is made the winner, so that rows show whether the padding counted."""
    inputs, kwargs = batch([30, 6, 2]), {"sequence_bias": {(0,): 60.0}, "max_new_tokens": 8}
    model = enabled()
    expected = stock_generate(model, **inputs, **kwargs, no_repeat_ngram_size=size)
    assert not torch.equal(expected, stock_generate(model, **inputs, **kwargs))
    assert_same_tensor(model.generate(**inputs, **kwargs, no_repeat_ngram_size=size), expected)


def test_a_rule_that_would_match_the_padding_is_not_carried_out_blindly():
    model, inputs = tiny_model(4, **NARROW), batch([8, 1])
    token = int(first_tokens(model, inputs)[1, 0])
    kwargs = {"bad_words_ids": [[0, int(inputs["input_ids"][1, -1]), token]], "max_new_tokens": 6}
    expected = model.generate(**inputs, **kwargs)
    assert not torch.equal(expected, model.generate(**inputs, max_new_tokens=6))
    hf_paged.enable(model)
    assert_same_tensor(model.generate(**inputs, **kwargs), expected)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_combination_of_options(data):
    token = st.integers(0, 40)
    options = {
        "repetition_penalty": st.floats(0.5, 3.0),
        "no_repeat_ngram_size": st.integers(0, 4),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=4),
        "sequence_bias": st.lists(st.tuples(st.lists(token, min_size=1, max_size=3), st.floats(-9.0, 9.0)), min_size=1,
                                  max_size=4).map(lambda rules: [list(rule) for rule in rules]),
        "suppress_tokens": st.lists(token, min_size=1, max_size=6),
        "begin_suppress_tokens": st.lists(token, min_size=1, max_size=6),
        "forced_bos_token_id": token,
        "forced_eos_token_id": token,
        "remove_invalid_values": st.booleans(),
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 5), st.floats(1.0, 1.5)),
        "renormalize_logits": st.booleans(),
        "min_new_tokens": st.integers(0, 6),
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(options)), unique=True, min_size=1, max_size=6))
    kwargs = {name: data.draw(options[name], label=name) for name in chosen}
    if "exponential_decay_length_penalty" in kwargs or data.draw(st.booleans()):
        kwargs["eos_token_id"] = data.draw(st.lists(token, min_size=1, max_size=3, unique=True))
    lengths = data.draw(st.sampled_from([[9], [1], [14, 14, 14], [20, 3, 17, 1, 9, 16, 12, 5]]))
    # A pool of 11 blocks is too small for eight rows: some are preempted and come back.
    pool = data.draw(st.sampled_from([{}, {"num_blocks": 11}]))
    model = tiny_model(4, **NARROW)
    inputs = batch(lengths)
    try:
        expected = model.generate(**inputs, **kwargs, max_new_tokens=16)
    except ValueError as error:  # a forced token that is suppressed
        hf_paged.enable(model, **pool)
        with pytest.raises(ValueError, match=re.escape(str(error))):
            model.generate(**inputs, **kwargs, max_new_tokens=16)
        return
    hf_paged.enable(model, **pool)
    assert_same_tensor(model.generate(**inputs, **kwargs, max_new_tokens=16), expected)
    assert_idle(model)


# -- sampling ------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"typical_p": 0.3}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.3},
                                    {"repetition_penalty": 4.0}, {"bad_words_ids": [[3], [4]]}])
def test_samples_follow_stocks_distribution(option):
    """First tokens of 3,000 draws against the probabilities of stock's own processed scores, by chi-square."""
    model = enabled(max_num_seqs=512)
    ids = torch.tensor(random_prompts([6]))
    kwargs = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, **option}
    stock = hf_paged.disable(tiny_model(4, **NARROW))
    scores = stock.generate(ids, max_new_tokens=1, **kwargs, return_dict_in_generate=True, output_scores=True).scores[0]
    probabilities = scores.softmax(-1)[0]
    torch.manual_seed(11)
    count = 3000
    drawn = model.generate(ids, max_new_tokens=1, num_return_sequences=count, **kwargs)[:, -1]
    seen = torch.bincount(drawn, minlength=len(probabilities)).double()
    assert seen[probabilities == 0].sum() == 0
    likely = probabilities * count >= 5
    expected = probabilities[likely].double() * count
    chi_square = ((seen[likely] - expected) ** 2 / expected).sum().item()
    freedom = int(likely.sum()) - 1
    assert freedom >= 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_rows_with_different_settings_in_one_batch_get_what_they_get_alone():
    model, prompts = tiny_model(4, **NARROW), random_prompts([20, 9, 33, 14, 25, 3])
    configs = [
        GenerationConfig(max_new_tokens=12, repetition_penalty=1.7),
        GenerationConfig(max_new_tokens=12),
        GenerationConfig(max_new_tokens=12, no_repeat_ngram_size=2, suppress_tokens=[3, 5]),
        GenerationConfig(max_new_tokens=12, do_sample=True, typical_p=0.4),
        GenerationConfig(max_new_tokens=12, do_sample=True, temperature=0.9),
        GenerationConfig(max_new_tokens=12, do_sample=True, repetition_penalty=1.3, top_p=0.8),
    ]
    with hf_paged.PagedGenerator(model, max_num_seqs=4) as generator:  # slots are used again by other settings
        seeds = list(range(len(prompts)))
        together = generator.generate(prompts * 2, configs * 2, seed=seeds * 2)
        alone = [generator.generate([p], [c], seed=[s])[0] for p, c, s in zip(prompts, configs, seeds, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] * 2
    greedy = [i for i, config in enumerate(configs) if not config.do_sample]
    for i in greedy:
        expected = stock_generate(model, input_ids=torch.tensor([prompts[i]]), generation_config=configs[i])
        assert prompts[i] + alone[i].token_ids == expected[0].tolist()


@pytest.mark.parametrize(("kwargs", "named"), [
    ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
    ({"bad_words_ids": []}, "bad_words_ids"),
    ({"bad_words_ids": [[999]]}, "bad_words_ids.*999"),
    ({"sequence_bias": {(3,): 1}}, "sequence_bias"),
    ({"forced_eos_token_id": 999}, "forced_eos_token_id.*999"),
    ({"exponential_decay_length_penalty": (1, 1.1)}, "exponential_decay_length_penalty.*eos_token_id"),
    ({"do_sample": True, "typical_p": -0.5}, "typical_p=-0.5"),
    ({"stop_strings": ["a"]}, "stop_strings.*tokenizer"),
    ({"stop_strings": [3]}, "stop_strings"),
])
def test_bad_values_are_named_before_anything_runs(kwargs, named):
    with hf_paged.PagedGenerator(tiny_model(), None) as generator:
        with pytest.raises((ValueError, TypeError), match=named):
            generator.generate([[1, 2, 3]], max_new_tokens=4, **kwargs)
        assert generator.engine.stats().num_generated_tokens == 0
        assert_idle(generator.model)


# -- stop strings and time ------------------------------------------


def stop_text(model, inputs, row=0, at=5):
    """A printable character that greedy search makes in a row, near `at`."""
    tokens = first_tokens(model, inputs, 16)[row].tolist()
    texts = [byte_tokenizer().decode([token]) for token in tokens]
    return next(text for text in texts[at:] + texts if text.isascii() and text.isprintable() and text.strip())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("lengths", [[20], [20, 33, 7, 15]])
def test_stop_strings(lengths, streamed):
    model, inputs = enabled(), batch(lengths)
    kwargs = {"stop_strings": [stop_text(model, inputs), "no such text"], "tokenizer": byte_tokenizer(),
              "eos_token_id": 55, "max_new_tokens": 30}
    ours, stocks = (RecordingStreamer(), RecordingStreamer()) if streamed else (None, None)
    expected = stock_generate(model, **inputs, **kwargs, streamer=stocks)
    plain = stock_generate(model, **inputs, max_new_tokens=30, eos_token_id=55)
    assert not torch.equal(expected, plain[:, : expected.shape[1]]) or expected.shape != plain.shape
    engine = hf_paged.get_engine(model)
    assert_same_tensor(model.generate(**inputs, **kwargs, streamer=ours), expected)
    assert engine.stats().num_generated_tokens > 0
    assert_idle(model)
    if streamed:
        assert ours.puts == stocks.puts
        assert ours.ended == stocks.ended == 1


def test_a_stop_string_over_several_tokens_that_begins_in_the_prompt():
    model, inputs = enabled(), batch([20])
    token = int(first_tokens(model, inputs)[0, 0])
    inputs["input_ids"][0, -1] = ord("q") - ord("!")  # a printable byte of the byte tokenizer
    text = byte_tokenizer().decode([int(inputs["input_ids"][0, -1]), int(first_tokens(model, inputs)[0, 0])])
    if not text.isprintable() or len(text) != 2:
        text = byte_tokenizer().decode([token])
    kwargs = {"stop_strings": text, "tokenizer": byte_tokenizer(), "max_new_tokens": 12}
    expected = stock_generate(model, **inputs, **kwargs)
    assert_same_tensor(model.generate(**inputs, **kwargs), expected)


def test_stop_strings_of_a_generator_end_requests_one_by_one():
    model, prompts = tiny_model(4, **NARROW), random_prompts([20, 33, 7])
    text = stop_text(model, batch([20]))
    with hf_paged.PagedGenerator(model, byte_tokenizer()) as generator:
        plain = generator.generate(prompts, max_new_tokens=20)
        stopped = generator.generate(prompts, max_new_tokens=20, stop_strings=text)
        streamed: dict[int, list[int]] = {}
        for index, output in generator.stream(prompts, max_new_tokens=20, stop_strings=[text]):
            streamed.setdefault(index, []).extend(output.new_token_ids)
    assert "stop" in {completion.finish_reason for completion in stopped}
    for index, (a, b) in enumerate(zip(plain, stopped, strict=True)):
        cuts = [i + 1 for i in range(len(a.token_ids)) if text in generator.tokenizer.decode(a.token_ids[: i + 1])]
        assert b.token_ids == a.token_ids[: cuts[0] if cuts else None]
        assert b.finish_reason == ("stop" if cuts else "length")
        assert streamed[index] == b.token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_strings_survive_preemption(overlap):
    model, inputs = enabled(num_blocks=13, overlap=overlap), batch([30, 17, 25, 9, 31, 16, 3, 28])
    kwargs = {"stop_strings": [stop_text(model, inputs, row=2, at=12)], "tokenizer": byte_tokenizer(),
              "eos_token_id": 55, "max_new_tokens": 40}
    expected = stock_generate(model, **inputs, **kwargs)
    assert_same_tensor(model.generate(**inputs, **kwargs), expected)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_a_stop_string_is_not_found_across_a_recovery(monkeypatch):
    """Rows start over after another caller's interrupt: what they had made before and make now is no text."""
    model, inputs, tokenizer = enabled(overlap=False), batch([20]), byte_tokenizer()
    strange = [token for token in range(256) if not tokenizer.decode([token]).isascii()]
    kwargs = {"max_new_tokens": 12, "suppress_tokens": strange}
    expected = stock_generate(model, **inputs, **kwargs)
    text = tokenizer.decode(expected[0, 20:])
    at = next(i for i in range(4, 12) if text[i] + text[0] not in text)
    engine, steps = hf_paged.get_engine(model), 0
    step = engine._core.step

    def interrupted_once(**kwargs):
        nonlocal steps
        steps += 1
        engine._core.dirty |= steps == at + 2  # the token at `at` is the last one
        step(**kwargs)

    monkeypatch.setattr(engine._core, "step", interrupted_once)
    kwargs |= {"stop_strings": [text[at] + text[0]], "tokenizer": tokenizer}
    assert_same_tensor(model.generate(**inputs, **kwargs), expected)
    assert steps > 12


def test_max_time_ends_every_row_with_at_least_a_token():
    model = enabled(max_num_seqs=2)
    output = model.generate(**batch([20, 9, 5]), max_new_tokens=400, max_time=1e-6, eos_token_id=55)
    assert output.shape == (3, 21)
    start = time.time()
    made = model.generate(**batch([20]), max_new_tokens=400, max_time=0.1)[0, 20:]
    assert 0 < len(made) < 400
    assert time.time() - start < 5
    assert_idle(model)


def test_options_of_one_request_do_not_stay_in_its_slot():
    model, inputs = hf_paged.enable(tiny_model(), strict=True, max_num_seqs=1), batch([20])
    plain = stock_generate(model, **inputs, max_new_tokens=8)
    for option in table.EDITS:
        if option.name in VALUES and not option.only_sampling:
            model.generate(**inputs, max_new_tokens=8, **VALUES[option.name])
            assert_native_parity(model, plain, **inputs, max_new_tokens=8)


@pytest.mark.each_value
@pytest.mark.parametrize(("owner", "name"), [
    (SharedLines, "_write"), (SharedLines, "_take"), (EditState, "put"), (edits, "upload"),
], ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 3])
def test_settings_that_were_half_written_are_neither_lost_nor_left_behind(monkeypatch, owner, name, error, at):
    """A call dies while its settings, or the neutral ones after them, are sent; the next calls are stock's."""
    model, inputs = enabled(max_num_seqs=2), batch([20])
    plain = stock_generate(model, **inputs, max_new_tokens=8)
    tokens = plain[0, 20:].tolist()
    kwargs = {"suppress_tokens": tokens[:2], "repetition_penalty": 1.5, "bad_words_ids": [[tokens[1], tokens[2]]]}
    edited = stock_generate(model, **inputs, max_new_tokens=8, **kwargs)
    original, calls = getattr(owner, name), 0

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls == at:
            raise error("here")
        return original(*args)

    for first, second in (({}, kwargs), (kwargs, {})):
        model.generate(**inputs, max_new_tokens=3, **first)
        with monkeypatch.context() as patch:
            calls = 0
            patch.setattr(owner, name, dying)
            with contextlib.suppress(error):
                model.generate(**inputs, max_new_tokens=3, **second)
        engine = hf_paged.get_engine(model)
        # Side by side, so that a slot which should be neutral is looked at by the stages of the other.
        prompt = inputs["input_ids"][0]
        ids = [engine.add_request(prompt, GenerationConfig(max_new_tokens=8, **each)) for each in ({}, kwargs)]
        made = {}
        made |= {o.request_id: o.completion.token_ids for o in run_out(engine) if o.completion is not None}
        assert [made[i] for i in ids] == [plain[0, 20:].tolist(), edited[0, 20:].tolist()]
        assert_idle(model)
