"""The heap is frozen while an engine is busy, and thawed when the last one is idle."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from support import Interrupt, batch, in_child, random_prompts, tiny_model
from threads import run_threads
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import PagedConfig, PagedGenerator
from hf_paged.engine import engine_registry
from hf_paged.engine.engine_registry import HeapHold, is_left_to_program
from hf_paged.engine.loop import EngineCore

INPUTS = batch([20, 9])


@pytest.fixture(scope="module", autouse=True)
def _no_other_code_freezes():
    """As in most programs, and not in the test suite (conftest.py)."""
    gc.unfreeze()
    gc.collect()
    is_left_to_program.cache_clear()
    yield
    is_left_to_program.cache_clear()
    gc.freeze()


@pytest.fixture(autouse=True)
def _starts_and_ends_thawed():
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0 and gc.isenabled()


@pytest.fixture
def model():
    return hf_paged.enable(tiny_model(), strict=True)


class Watching(LogitsProcessor):
    """In each step of a call in lockstep: was the heap frozen?"""

    def __init__(self, action=None):
        self.frozen, self.action = [], action

    def __call__(self, input_ids, scores):
        self.frozen.append(gc.get_freeze_count() > 0)
        if self.action is not None:
            self.action()
        return scores


class Streamer:
    """The same of a native call."""

    def __init__(self, action=lambda: None):
        self.frozen, self.action = [], action

    def put(self, value):
        self.frozen.append(gc.get_freeze_count() > 0)
        self.action()

    def end(self):
        pass


class Thing:
    """What only a garbage collection can free, as soon as nobody else has it."""

    def __init__(self):
        self.me = self


def one_row(model, action=lambda: None, new_tokens=4):
    """Was the heap frozen at each token of a native call? The first one is the prompt, before the engine is busy."""
    streamer = Streamer(action)
    model.generate(**batch([12]), max_new_tokens=new_tokens, streamer=streamer)
    return streamer.frozen[1:]


def test_a_call_in_lockstep_does_as_well(model):
    watching = Watching()
    model.generate(**INPUTS, max_new_tokens=4, logits_processor=LogitsProcessorList([watching]))
    assert watching.frozen == [True] * 4


def test_a_call_freezes_the_heap(model):
    counts = []
    frozen = one_row(model, lambda: counts.append(gc.get_freeze_count()))
    assert all(frozen[:-1]) and max(counts) > 100_000 and gc.get_freeze_count() == 0
    assert all(one_row(model)[:-1])


def test_the_heap_is_looked_at_once_the_device_has_work(monkeypatch):
    seen, launch, commit = [], EngineCore._launch, EngineCore._commit

    def look(name, own):
        def looking(self, step, *others):
            if step is not None:
                seen.append((name, gc.get_freeze_count() > 0))
            return own(self, step, *others)
        return looking

    monkeypatch.setattr(EngineCore, "_launch", look("launch", launch))
    monkeypatch.setattr(EngineCore, "_commit", look("commit", commit))
    with PagedGenerator(tiny_model(), config=PagedConfig(num_blocks=64)) as generator:
        for _ in range(2):
            gc.collect()
            seen.clear()
            generator.generate(random_prompts([12, 9]), max_new_tokens=4)
            assert seen == [("launch", False), ("commit", True), *[("launch", True), ("commit", True)] * 3]


def test_garbage_of_before_is_collected_afterwards_and_garbage_of_during_at_once():
    old, hold = weakref.ref(before := Thing()), HeapHold()
    gc.collect(1)  # the object is in an older generation
    hold.note(True)
    new, young = weakref.ref(Thing()), old()
    del before, young
    gc.collect()
    assert old() is not None and new() is None
    hold.note(False)
    gc.collect()
    assert old() is None


def test_young_garbage_is_collected_before_the_heap_is_frozen():
    thing, hold = weakref.ref(Thing()), HeapHold()
    hold.note(True)
    assert thing() is None and gc.get_freeze_count()
    hold.note(False)


def test_the_heap_stays_frozen_until_no_engine_is_busy():
    first, second = HeapHold(), HeapHold()
    for hold, is_busy in ((first, True), (second, True), (first, True), (first, False)):
        hold.note(is_busy)
        assert gc.get_freeze_count()
    del second  # a busy engine that was dropped


def test_what_the_program_froze_stays_frozen(model):
    is_left_to_program.cache_clear()
    thing = Thing()
    gc.freeze()
    try:
        one_row(model)
        assert not any(one is thing for generation in range(3) for one in gc.get_objects(generation))
    finally:
        gc.unfreeze()
        is_left_to_program.cache_clear()


@pytest.mark.parametrize(("count", "is_left"), [(0, False), (375, False), (5_000, True)])
def test_the_few_objects_that_python_itself_froze_are_no_heap_of_the_program(monkeypatch, count, is_left):
    """Python 3.12.3 starts with 375."""
    monkeypatch.setattr(engine_registry.gc, "get_freeze_count", lambda: count)
    is_left_to_program.cache_clear()
    try:
        assert is_left_to_program() is is_left
    finally:
        is_left_to_program.cache_clear()


def test_an_interrupt_behind_the_freezing_leaves_nothing_frozen(monkeypatch):
    freeze, hold = gc.freeze, HeapHold()

    def interrupted():
        freeze()
        raise Interrupt

    monkeypatch.setattr(engine_registry.gc, "freeze", interrupted)
    with pytest.raises(Interrupt):
        hold.note(True)
    assert gc.get_freeze_count()
    hold.note(False)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_freezes_for_itself(model):
    hold = HeapHold()
    hold.note(True)

    def freeze():
        hold.note(False)
        assert not gc.get_freeze_count() and any(one_row(model))

    assert in_child(freeze) == 0
    hold.note(False)


def test_nothing_is_frozen_while_collections_are_off(model):
    gc.disable()
    try:
        assert not any(one_row(model))
    finally:
        gc.enable()
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        assert not any(one_row(model))
    finally:
        gc.set_threshold(*thresholds)
    assert any(one_row(model))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["streamer", "processor", "launch"])
def test_a_call_that_dies_leaves_nothing_frozen(model, monkeypatch, error, place):
    seen = []

    def die(*_args, **_kwargs):
        if count := gc.get_freeze_count():
            seen.append(count)
            raise error

    options = {}
    if place == "streamer":
        options["streamer"] = Streamer(die)
    elif place == "processor":
        options["logits_processor"] = LogitsProcessorList([Watching(die)])
    else:
        monkeypatch.setattr(EngineCore, "_launch", die)
    with pytest.raises(error):
        model.generate(**batch([12]), max_new_tokens=8, **options)
    gc.collect()
    assert seen and gc.get_freeze_count() == 0
    monkeypatch.undo()
    assert any(one_row(model))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["abort", "shutdown", "disable", "close", "dropped", "not added"])
def test_requests_that_are_ended_from_outside_leave_nothing_frozen(model, monkeypatch, end):
    engine = hf_paged.get_engine(model)
    name = engine.add_request(random_prompts([12])[0], GenerationConfig(max_new_tokens=50))
    engine.step()
    if end == "abort":
        engine.abort(name)
    elif end == "shutdown":
        engine.shutdown()
    elif end == "disable":
        hf_paged.disable(model)
    elif end == "not added":
        engine.abort(name)
        monkeypatch.setattr(EngineCore, "scheduler_or_build", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(**batch([12]), max_new_tokens=4)
    else:
        engine.abort(name)
        with PagedGenerator(tiny_model(), config=PagedConfig(num_blocks=64)) as generator:
            stream = generator.stream(random_prompts([12, 9]), max_new_tokens=50)
            next(stream)
            gc.collect()
            assert gc.get_freeze_count()
            if end == "close":
                stream.close()
            del stream
            gc.collect()
            assert gc.get_freeze_count() == 0
    gc.collect()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_engines_in_threads_leave_nothing_frozen():
    def run():
        hold = HeapHold()
        for turn in range(2000):
            hold.note(turn % 2 == 0)
            if turn % 500 == 0:
                gc.collect()

    threads = [threading.Thread(target=run) for _ in range(4)]
    run_threads(threads)
    gc.collect()
    assert gc.get_freeze_count() == 0

