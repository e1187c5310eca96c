"""Events where nothing runs; over ranks they are tested in `parallel/test_generator_over_ranks.py`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import batch, tiny_model

import hf_paged
from hf_paged.engine.commands import Add, End, Events
from hf_paged.engine.session import Request
from hf_paged.options.settings import RequestSettings
from hf_paged.parallel.group import ParallelGroup
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence


class Maker:
    def make_request(self, event, session=None):
        raise AssertionError(f"nobody waits for {event}")


def test_the_end_of_what_has_ended_is_not_told():
    """Ranks of one script all call `step`; with nothing running, those without such an end would not meet rank 0."""
    loop = SimpleNamespace(is_idle=True, heard=False, requests={}, failed_here=[], step=lambda **_: None)
    maker = Maker()
    events = Events(ParallelGroup(0, 2), loop, maker.make_request)
    events.soon(End(("gone",), "length"))
    assert events.step() == []
    assert events.step() == []


def made(event, session=None):
    sequence = Sequence(event.request_id, event.prompt, max_new_tokens=event.settings.max_new_tokens)
    parameters = SlotParameters(False, 1.0, 0, 1.0, 0.0, event.seed, 0, (), 10)
    return Request(sequence, parameters, session)


class Rank1(Events):
    """A rank that runs the same script as rank 0."""

    def __init__(self):
        self.added = []
        loop = SimpleNamespace(add=self.added.append)
        super().__init__(ParallelGroup(1, 2), loop, self.make)

    def make(self, event, session=None):
        return made(event, session)


def test_ranks_of_one_script_have_to_ask_for_the_same():
    """Other prompts or settings would part the ranks later; the seed of a call without one is rank 0's."""
    event = Add("a", [1, 2], RequestSettings(max_new_tokens=4), 5, 0, None)
    session = SimpleNamespace()
    for other in (replace(event, prompt=[1, 3]), replace(event, settings=RequestSettings(max_new_tokens=5))):
        rank = Rank1()
        rank.expected["a"] = made(other, session)
        with pytest.raises(ValueError, match="rank 1 was given another prompt or other settings than rank 0"):
            rank._take_in(event)
    rank = Rank1()
    rank.expected["a"] = made(replace(event, seed=6), session)
    rank._take_in(event)
    assert rank.added[0].session is session and rank.added[0].parameters.seed == 5 and not rank.expected


def test_an_engine_ends_while_another_captures_a_graph(monkeypatch):
    """torch refuses to empty its cache then."""
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([4]), max_new_tokens=2)

    def refuses():
        raise RuntimeError("a capture is underway")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    assert not hf_paged.is_enabled(hf_paged.disable(model))
