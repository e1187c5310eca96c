"""Texts that end an answer: what is sent of it, piece by piece."""

from __future__ import annotations

import random

import pytest

from hf_paged.engine.text import StopTexts, cut
from hf_paged.integration.continuous_batching.requests import ServedOutput
from hf_paged.server.choices import finish_reason


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


def test_an_end_at_the_last_token_that_was_allowed_is_no_matter_of_length():
    def reason(how, is_met=False, most=2):
        return finish_reason(ServedOutput("one", generated_tokens=[5, 6], finish_reason=how), is_met, most)

    assert [reason("eos"), reason("stop"), reason("length", is_met=True), reason(None, is_met=True)] == ["stop"] * 4
    assert [reason("length"), reason(None), reason(None, most=3)] == ["length", "length", "stop"]
