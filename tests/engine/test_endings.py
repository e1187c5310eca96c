"""What ended a request, and what of it is text: whole and streamed, for strings, tokens, and neither."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import byte_generator, byte_tokenizer, random_prompts, run_out, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator
from hf_paged.engine.text import StopPolicy, StopTexts, TextStream

PROMPTS = random_prompts([20, 5, 33, 16])
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 3, "max_new_tokens": 30}

generator = pytest.fixture(byte_generator, scope="module", name="generator")


@pytest.fixture(scope="module")
def free(generator):
    """What is made where nothing ends it."""
    return generator.generate(PROMPTS, **SAMPLED)


def first_stop(text, strings):
    watch = StopTexts(tuple(strings))
    watch.push(text)
    return watch.met


def streamed(generator, prompts, **keywords):
    """The pieces of each text, joined, and its completion."""
    texts, ends = {}, {}
    for index, output in generator.stream(prompts, **keywords):
        texts[index] = texts.get(index, "") + (output.new_text or "")
        if output.completion is not None:
            ends[index] = output.completion
    return [(texts[i], ends[i]) for i in sorted(ends)]


def ascii_ends(free):
    """Of each output a token whose character stands for itself, somewhere in the middle."""
    return [next(t for t in one.token_ids[8:] if t < 90) for one in free]


def text_of(generator, ids, **options):
    return generator.tokenizer.decode(ids, **{"skip_special_tokens": True, **options})


@pytest.mark.parametrize("keeps", [True, False])
def test_a_stop_token_ends_a_request_and_is_told(generator, free, keeps):
    stops = ascii_ends(free)
    keywords = {**SAMPLED, "stop_token_ids": [[token] for token in stops], "include_stop_str_in_output": keeps}
    for one, whole, token in zip(generator.generate(PROMPTS, **keywords), free, stops, strict=True):
        count = whole.token_ids.index(token) + 1
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (whole.token_ids[:count], "stop", token)
        assert one.text == text_of(generator, one.token_ids if keeps else one.token_ids[:-1])
    for text, one in streamed(generator, PROMPTS, **keywords):
        assert text == one.text and one.finish_reason == "stop"


def test_an_eos_is_none_of_them(generator, free):
    """Also where it is named twice; text without it, where what ended it is to be left out."""
    token = ascii_ends(free)[0]
    keywords = {**SAMPLED, "eos_token_id": token}
    for more in ({}, {"stop_token_ids": [token]}):
        [one] = generator.generate(PROMPTS[:1], **keywords, **more)
        assert (one.token_ids[-1], one.finish_reason, one.stop_reason) == (token, "eos", None)
    for text, one in streamed(generator, PROMPTS[:1], **keywords, include_stop_str_in_output=False):
        assert text == one.text == text_of(generator, one.token_ids[:-1])


def test_a_least_length_bars_stop_tokens(generator, free):
    token = ascii_ends(free)[0]
    at = free[0].token_ids.index(token)
    [one] = generator.generate(PROMPTS[:1], **SAMPLED, stop_token_ids=[token], min_new_tokens=at + 4)
    assert token not in one.token_ids[: at + 4] and len(one.token_ids) >= at + 4


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_a_stop_string_ends_a_request_and_is_told(generator, free, keeps, several):
    """Of several the one that came, whole and streamed."""
    stops = [text_of(generator, [token]) for token in ascii_ends(free)]
    strings = [*stops, "never there"] if several else stops[:1]
    keywords = {**SAMPLED, "stop_strings": strings, "include_stop_str_in_output": keeps}
    made = generator.generate(PROMPTS, **keywords)
    assert len({one.stop_reason for one in made}) > several
    for one, whole in zip(made, free, strict=True):
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
        expected = first_stop(text_of(generator, whole.token_ids), strings)
        assert (one.finish_reason, one.stop_reason) == ("length" if expected is None else "stop", expected)
        everything = text_of(generator, one.token_ids)
        if expected is not None and not keeps:
            everything = everything[: everything.index(expected)]
        assert one.text == everything
    for (text, end), one in zip(streamed(generator, PROMPTS, **keywords), made, strict=True):
        assert (text, end.stop_reason, end.token_ids) == (one.text, one.stop_reason, one.token_ids)


def test_nothing_ended_it_but_its_length(generator):
    for one in generator.generate(PROMPTS, **SAMPLED, stop_strings="not there", stop_token_ids=None,
                                  include_stop_str_in_output=False):
        assert (one.finish_reason, one.stop_reason) == ("length", None)
        assert one.text == text_of(generator, one.token_ids)


def test_special_tokens_in_the_text(generator):
    special = generator.tokenizer.all_special_ids[0]
    keywords = {"max_new_tokens": 4, "sequence_bias": {(special,): 50.0}, "eos_token_id": 300 - 60}
    for skips in (True, False):
        for text, one in streamed(generator, PROMPTS[:1], **keywords, skip_special_tokens=skips):
            assert special in one.token_ids
            assert one.text == text == text_of(generator, one.token_ids, skip_special_tokens=skips)
            assert (generator.tokenizer.decode([special]) in one.text) != skips


def test_what_ended_it_is_told_of_a_request_that_goes_on(generator, free):
    token = ascii_ends(free)[0]
    [whole] = generator.generate(PROMPTS[:1], **SAMPLED, stop_token_ids=[token])
    for count in (2, len(whole.token_ids)):
        before = {"prompt_token_ids": PROMPTS[0], "output_token_ids": whole.token_ids[:count]}
        [one] = generator.generate([before], **SAMPLED, stop_token_ids=[token], include_stop_str_in_output=False)
        assert (one.token_ids, one.stop_reason) == (whole.token_ids, token)
        assert one.text == text_of(generator, whole.token_ids[:-1])


def test_without_a_tokenizer_a_stop_token_is_still_told(free):
    token = ascii_ends(free)[0]
    with PagedGenerator(tiny_model()) as generator:
        [one] = generator.generate(PROMPTS[:1], **SAMPLED, stop_token_ids=[token], include_stop_str_in_output=False)
    assert (one.text, one.finish_reason, one.stop_reason) == (None, "stop", token)


@pytest.mark.parametrize(("text", "strings", "expected"), [
    ("ab", ["b", "a"], "a"), ("xab", ["b", "ab"], "ab"), ("xabc", ["abc", "b"], "b"), ("x", ["a"], None),
])
def test_of_several_the_one_that_is_whole_first(text, strings, expected):
    assert first_stop(text, strings) == expected


class Letters:
    """A tokenizer in which each token is its letter."""

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


@settings(max_examples=200)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_pieces_of_a_cut_text_join_to_it(text, strings, data):
    """However the text comes, and wherever it is begun anew: never a character too many, and all of it in the end."""
    stop = first_stop(text, strings)
    whole = text if stop is None else min((text[: text.find(s)] for s in strings if s in text
                                           and text.find(s) + len(s) == text.find(stop) + len(stop)), key=len)
    stream, sent = TextStream(Letters(), stop_strings=tuple(strings)), ""
    at = 0
    while at < len(text):
        step = data.draw(st.integers(1, 3))
        sent += stream.push([*map(ord, text[at : at + step])])
        at += step
        assert whole.startswith(sent)
        if data.draw(st.booleans()):
            stream.restart([*map(ord, text[:at])])
    assert sent + stream.finish(whole) == whole


@pytest.mark.parametrize("keeps", [True, False])
def test_a_text_is_streamed_whole_through_one_interrupt_behind_another(generator, free, keeps):
    """The second comes while the tokens that were streamed before the first are still made again."""
    engine = generator.engine
    engine.add_request(PROMPTS[0], GenerationConfig(**{k: v for k, v in SAMPLED.items() if k != "seed"}), seed=3,
                       include_stop_str_in_output=keeps)
    outputs = [output for _ in range(8) for output in engine.step()]
    for steps in (3, 0):
        engine._core.dirty = True  # as an interrupt leaves it
        outputs += [output for _ in range(steps) for output in engine.step()]
    run_out(engine, outputs)
    made = outputs[-1].completion
    assert [token for output in outputs for token in output.new_token_ids] == made.token_ids == free[0].token_ids
    assert "".join(output.new_text for output in outputs) == made.text == free[0].text


def test_an_ending_that_asks_for_nothing_changes_nothing():
    tokenizer = byte_tokenizer()
    ids = [70, 71, 72]
    assert StopPolicy().text("eos", ids, tokenizer) == tokenizer.decode(ids)
    assert StopPolicy().reason("eos", ids, tokenizer) == ("eos", None)
    assert StopPolicy().reason("timeout", ids, tokenizer) == ("timeout", None)
