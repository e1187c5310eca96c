"""An observer is told of every step and request, over preemption, interrupts, launches that raise and aborts."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from support import Interrupt, assert_idle, batch, interrupted, random_prompts, run_out, tiny_model
from transformers import GenerationConfig

import hf_paged

shared_model = functools.cache(tiny_model)
LENGTHS = [30, 17, 25, 9, 31]


@pytest.fixture
def engine(request):
    options = getattr(request, "param", {})
    yield hf_paged.get_engine(hf_paged.enable(shared_model(), strict=True, **options))
    hf_paged.disable(shared_model())


class Books:
    """Checks each event against those before it, as an observer that keeps books has to rely on."""

    def __init__(self):
        self.open = {}
        self.tokens = Counter()  # accepted ones of open requests
        self.in_flight = []
        self.steps, self.completions, self.num_started_over, self.num_preempted = [], {}, 0, 0

    def queued(self, request):
        assert request.request_id not in self.open
        self.open[request.request_id] = request
        self.tokens[request.request_id] = request.num_emitted

    def launched(self, step):
        assert step.began <= step.scheduled <= step.launched
        assert not self.steps or step.number > self.steps[-1].number
        self.steps.append(step)
        self.num_preempted += step.num_preempted
        if step.plan is not None:
            assert {one.request_id for one in step.plan.admitted} <= set(self.open)
            self.in_flight.append(step.plan)

    def committed(self, step):
        assert step.plan is self.in_flight.pop(0)
        assert step.waited <= step.ready
        for row in step.accepted.tolist():
            self.tokens[step.plan.sequences[row].request_id] += 1

    def finished(self, request, output):
        assert self.open.pop(request.request_id) is request
        assert self.tokens.pop(request.request_id) == len(output.completion.token_ids)
        self.completions[request.request_id] = output.completion

    def started_over(self, unfinished):
        self.num_started_over += 1
        self.in_flight.clear()
        kept = {request.request_id: request for request in unfinished}
        assert all(self.open[key] is request for key, request in kept.items())
        self.open = kept
        self.tokens = Counter({key: request.sequence.num_output_tokens for key, request in kept.items()})


def add_all(engine, new_tokens=12, prefix="r"):
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    return [engine.add_request(prompt, config, request_id=f"{prefix}{i}")
            for i, prompt in enumerate(random_prompts(LENGTHS))]


def run(engine):
    completions = {}
    completions |= {o.request_id: o.completion for o in run_out(engine) if o.completion is not None}
    return completions


@pytest.mark.parametrize("engine", [{"overlap": False}, {"overlap": True}, {"overlap": True, "num_blocks": 7},
                                    {"overlap": False, "max_num_batched_tokens": 16, "max_num_seqs": 3}],
                         indirect=True, ids=["plain", "overlap", "preemption", "chunks"])
def test_every_request_and_token_is_told_once(engine):
    books = Books()
    engine.watch(books)
    ids = add_all(engine)
    completions = run(engine)
    assert books.completions == completions and set(completions) == set(ids)
    assert not books.open and not books.in_flight and not books.tokens and not books.num_started_over
    stats = engine.stats()
    assert books.steps[-1].number == stats.num_steps == len(books.steps)
    assert books.num_preempted == stats.num_preemptions
    assert (books.num_preempted > 0) == (stats.num_blocks == 7)


@pytest.mark.parametrize("engine", [{"overlap": True, "num_blocks": 7}], indirect=True)
def test_books_hold_over_interrupts_at_any_point(engine):
    books = Books()
    engine.watch(books)
    died = 0
    for at in range(40, 2000, 97):
        ids = set(add_all(engine, 6, prefix=f"{at}-"))
        try:
            with interrupted(at):
                run(engine)
        except Interrupt:
            died += 1
        books_of_rest = run(engine)
        assert set(books_of_rest) <= ids  # outputs that an interrupted step() had taken are lost with it
        assert not books.open and not books.in_flight
        assert_idle(shared_model())
    assert died > 5 and books.num_started_over >= died / 2


def test_a_launch_that_raises_starts_everybody_over(engine, monkeypatch):
    books = Books()
    engine.watch(books)
    add_all(engine)
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine._core.runner, "launch", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert books.num_started_over == 1 and len(books.open) == 5
    assert books.completions == {} and len(run(engine)) == 5
    assert len(books.completions) == 5 and not books.open


def test_aborted_requests_finish(engine):
    books = Books()
    engine.watch(books)
    ids = add_all(engine)
    engine.step()
    engine.abort(ids[2])
    run(engine)
    assert books.completions[ids[2]].finish_reason == "abort"
    assert Counter(c.finish_reason for c in books.completions.values()) == {"length": 4, "abort": 1}


def test_calls_in_lockstep_are_steps_without_a_plan(engine, lockstep_only):
    books = Books()
    engine.watch(books)
    shared_model().generate(**batch([9, 4]), max_new_tokens=3)
    joined = [step for step in books.steps if step.joined]
    assert joined and all(step.plan is None and len(step.joined[0].slots) == 2 for step in joined)


def test_one_that_raises_is_dropped_with_a_warning_and_harms_nobody(engine, caplog):
    class Broken(Books):
        def committed(self, step):
            raise RuntimeError("full disk")

    broken, books = Broken(), Books()
    engine.watch(broken)
    engine.watch(books)
    expected = run_alone()
    add_all(engine)
    assert {key: c.token_ids for key, c in run(engine).items()} == expected
    assert not broken.completions and len(books.completions) == 5
    assert len([record for record in caplog.records if "is not told" in record.message]) == 1


def run_alone():
    fresh = tiny_model()
    engine = hf_paged.get_engine(hf_paged.enable(fresh, strict=True))
    add_all(engine)
    return {key: completion.token_ids for key, completion in run(engine).items()}


def test_unwatched_is_told_nothing(engine):
    books = Books()
    engine.watch(books)
    engine.unwatch(books)
    engine.unwatch(books)
    add_all(engine)
    run(engine)
    assert not books.steps and not books.completions


def test_an_engine_without_observers_tells_nobody(engine, monkeypatch):
    """Not even the event is made."""
    monkeypatch.setattr("hf_paged.engine.loop.Launched", None)
    monkeypatch.setattr("hf_paged.engine.loop.Committed", None)
    add_all(engine)
    assert len(run(engine)) == 5
