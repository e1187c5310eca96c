"""Commands where nothing runs; over ranks they are tested in `parallel/test_generator_over_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support import batch, tiny_model

import hf_paged
from hf_paged.engine.features.stop_rules import StopRule
from hf_paged.engine.ranks.commands import CommandQueue, End
from hf_paged.engine.session import Request
from hf_paged.options.request_spec import RequestSpec
from hf_paged.parallel.group import ParallelGroup


def test_the_end_of_what_has_ended_is_not_told():
    """Ranks of one script all call `step`; with nothing running, those without such an end would not meet rank 0."""
    core = SimpleNamespace(is_idle=True, control_flag=False, requests={}, failed_here=[], step=lambda **_: None)
    commands = CommandQueue(ParallelGroup(0, 2), core)
    commands.enqueue(End(("gone",), "length"))
    assert commands.step() == []
    assert commands.step() == []


def made(command, session):
    return Request.of(command, session, vocab_size=256, max_model_len=10, on_weight_change="recompute")


class Rank1(CommandQueue):
    """A rank that runs the same script as rank 0."""

    def __init__(self):
        self.added = []
        super().__init__(ParallelGroup(1, 2), SimpleNamespace(add=self.added.append, make_request=made))


def test_ranks_of_one_script_have_to_ask_for_the_same():
    """Other prompts or settings would part the ranks later; the seed of a call without one is rank 0's."""
    command = RequestSpec([1, 2], 4, seed=5, request_id="a")
    session = SimpleNamespace()
    for other in (command.but(prompt=[1, 3]), command.but(max_new_tokens=5)):
        rank = Rank1()
        rank.expected["a"] = made(other, session)
        with pytest.raises(ValueError, match="rank 1 was given another prompt or other settings than rank 0"):
            rank._apply(command)
    rank = Rank1()
    rank.expected["a"] = made(command.but(seed=6), session)
    rank._apply(command)
    assert rank.added[0].session is session and rank.added[0].spec.seed == 5 and not rank.expected


def test_an_id_that_is_used_again_has_no_time_of_before():
    """Its first request was ended before the step that would have noticed."""
    added = []
    core = SimpleNamespace(add=added.append, make_request=made, requests={}, drain=lambda: None)
    commands = CommandQueue(ParallelGroup(0, 2), core)
    command = RequestSpec([1, 2], 4, seed=5, request_id="a")
    late = command.but(stop=StopRule(None, 1.0, []))
    for new, deadline in ((late, 1.0), (command, None)):
        commands.expected["a"] = made(new, SimpleNamespace())
        commands.expected["a"].deadline = deadline
        commands._apply(new)
        commands._apply(End(("a",), "abort"))
    assert [one.deadline for one in added] == [1.0, None]
    assert not commands._limits


def test_an_engine_ends_while_another_captures_a_graph(monkeypatch):
    """torch refuses to empty its cache then."""
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([4]), max_new_tokens=2)

    def refuses():
        raise RuntimeError("a capture is underway")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    assert not hf_paged.is_enabled(hf_paged.disable(model))
