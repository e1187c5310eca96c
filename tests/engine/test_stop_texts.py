"""Texts that end an answer: what is sent of it, piece by piece."""

from __future__ import annotations

import random

import pytest
from support import byte_tokenizer

from hf_paged.engine.text import StopPolicy, StopTexts, cut


@pytest.mark.parametrize("keeps", [False, True])
def test_pieces_join_up_to_the_text_before_its_first_stop(keeps):
    """And nothing is sent that a stop text may still begin with, or that is not sent in the end."""
    rng = random.Random(0)
    num_met = 0
    for _ in range(3000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(0, 12)))
        stops = tuple("".join(rng.choice("ab\n") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3)))
        expected, is_met = earliest(text, stops, keeps)
        watch, sent, rest = StopTexts(stops, keeps), "", text
        while rest and not watch.is_met:
            size = rng.randint(1, 3)
            before = len(text) - len(rest) + min(size, len(rest))
            sent += watch.push(rest[:size])
            rest = rest[size:]
            assert expected.startswith(sent)
            if not watch.is_met:
                assert len(sent) >= before - max(map(len, stops), default=1) + 1  # no more is held than may be a stop
        sent += watch.finish()
        assert (sent, watch.is_met) == (expected, is_met), (text, stops)
        num_met += is_met
        assert cut(text, stops, keeps) == (expected, is_met)
    assert 500 < num_met < 2900


def earliest(text, stops, keeps):
    """As tokens come: the stop text that is complete first, else the one that begins first."""
    for end in range(1, len(text) + 1):
        if any(text[:end].endswith(stop) for stop in stops):
            start = min(end - len(stop) for stop in stops if text[:end].endswith(stop))
            return (text[:end] if keeps else text[:start]), True
    return text, False


def test_nothing_follows_a_stop():
    watch = StopTexts(("b",))
    assert [watch.push(piece) for piece in ("a", "b", "c", "")] == ["a", "", "", ""]
    assert watch.finish() == ""


@pytest.mark.parametrize("stops", [("lo",), ("x", "lo")])
def test_a_stop_at_the_last_token_that_was_allowed_is_no_matter_of_length(stops):
    tokenizer = byte_tokenizer()
    ids = tokenizer("hello")["input_ids"]
    assert tokenizer.decode(ids) == "hello"
    cuts, keeps = StopPolicy(stops, keeps_stop=False), StopPolicy(stops)
    assert cuts.reason("length", ids, tokenizer) == ("stop", "lo")
    assert cuts.text("length", ids, tokenizer) == "hel"
    assert cuts.reason("length", ids[:-1], tokenizer) == ("length", None)
    assert cuts.reason("length", ids, None) == ("length", None)
    assert cuts.text("length", ids[:-1], tokenizer) == "hell"
    assert keeps.reason("length", ids, tokenizer) == ("length", None)  # as `model.generate` ends there
    assert keeps.text("length", ids, tokenizer) == "hello"
