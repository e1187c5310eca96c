"""The heap is frozen while engines are busy; a full collection of an idle process takes back what engines froze."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from support import Interrupt, batch, random_prompts, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import PagedConfig, PagedGenerator
from hf_paged.engine import frozen_heap
from hf_paged.engine.frozen_heap import FrozenHeap, HeapHold
from hf_paged.engine.loop import EngineCore

INPUTS = batch([20, 9])


@pytest.fixture(scope="module", autouse=True)
def _nobody_else_freezes():
    """As programs are, and the test suite is not (conftest.py)."""
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def _starts_unfrozen_and_ends_so_after_a_full_collection():
    assert gc.get_freeze_count() == 0
    yield
    gc.collect()
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    ours = [one for one in gc.callbacks if isinstance(getattr(one, "__self__", None), FrozenHeap)]
    assert len(ours) == len({id(one.__self__) for one in ours}), "one of each heap, however often it was frozen"
    for one in ours:
        gc.callbacks.remove(one)


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


@pytest.fixture
def heap():
    """Of its own, as one of a process."""
    return FrozenHeap()


def test_a_call_freezes_the_heap(model):
    assert all(one_row(model)[:-1])
    assert gc.get_freeze_count() > 100_000
    gc.collect()
    assert gc.get_freeze_count() == 0
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


@pytest.mark.slow
def test_garbage_of_before_is_collected_afterwards_and_garbage_of_during_at_once(model):
    before = Thing()
    old, seen = weakref.ref(before), []

    def collect():
        nonlocal before
        before, during = None, Thing()
        new = weakref.ref(during)
        del during
        gc.collect()
        seen.append((old() is None, new() is None))

    one_row(model, lambda: collect() if gc.get_freeze_count() else None)
    *during_the_call, at_its_end = seen
    assert set(during_the_call) == {(False, True)} and at_its_end == (True, True)


def test_young_garbage_is_collected_before_the_heap_is_frozen(heap):
    thing = weakref.ref(Thing())
    heap.hold(1)
    assert thing() is None and gc.get_freeze_count()
    heap.let_go(1)
    gc.collect()


def test_the_heap_stays_frozen_until_no_engine_is_busy():
    first, second = HeapHold(), HeapHold()
    for hold, is_busy in ((first, True), (second, True), (first, True), (first, False)):
        hold.note(is_busy)
        gc.collect()
        assert gc.get_freeze_count()
    del second
    gc.collect()
    assert gc.get_freeze_count() == 0


def test_what_is_made_while_the_heap_is_frozen_is_not_frozen_by_the_next_call(heap):
    """Else a process that is always busy would leave out more and more."""
    heap.hold(1)
    heap.let_go(1)
    thing = Thing()
    seen = weakref.ref(thing)
    heap.hold(1)
    del thing
    gc.collect()
    assert seen() is None and gc.get_freeze_count()
    heap.let_go(1)
    gc.collect()


def is_frozen(thing):
    """None of the lists that collections look through has it."""
    return not any(one is thing for generation in range(3) for one in gc.get_objects(generation))


@pytest.mark.parametrize("when", ["before", "during", "afterwards"])
def test_what_a_caller_froze_stays_frozen(model, when):
    """Also where more of what engines froze has died than was frozen by the caller."""
    dying = [[] for _ in range(20_000)]
    thing = Thing()

    def freeze():
        gc.freeze()
        assert is_frozen(thing)

    if when == "before":
        freeze()
    try:
        one_row(model, freeze if when == "during" else lambda: None)
        if when == "afterwards":
            thing = Thing()
            dying.clear()
            freeze()
        for _ in range(2):
            gc.collect()
            assert is_frozen(thing)
            one_row(model)
    finally:
        gc.unfreeze()
        gc.collect()
    assert any(one_row(model)), "where the caller takes everything back, the next call freezes again"


def test_objects_that_others_froze_are_counted_once_between_full_collections(heap, monkeypatch):
    counts = []
    monkeypatch.setattr(frozen_heap.gc, "get_freeze_count", lambda: counts.append(None) or 5)
    for expected in (1, 2):
        for _ in range(10):
            heap.hold(1)
        assert len(counts) == expected and not heap.is_frozen
        gc.collect()


@pytest.mark.slow
def test_a_caller_may_unfreeze_in_between(model):
    assert any(one_row(model, gc.unfreeze))
    gc.collect()
    assert all(one_row(model)[:-1])


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


def test_a_stream_abandoned_in_a_cycle_is_collected_once_no_step_comes(monkeypatch):
    with PagedGenerator(tiny_model(), config=PagedConfig(num_blocks=64)) as generator:
        thing = Thing()
        thing.stream = generator.stream(random_prompts([12]), max_new_tokens=50)
        next(thing.stream)
        del thing
        gc.collect()
        assert gc.get_freeze_count(), "steps may go on"
        monkeypatch.setattr(frozen_heap, "_PATIENCE", 0.0)
        gc.collect()
        assert gc.get_freeze_count() == 0 and generator.engine.stats().num_running == 0


def test_an_interrupt_behind_the_freezing_leaves_nothing_frozen(heap, monkeypatch):
    freeze = gc.freeze

    def interrupted():
        freeze()
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(frozen_heap.gc, "freeze", interrupted)
        with pytest.raises(Interrupt):
            heap.hold(1)
    heap.let_go(1)
    gc.collect()
    assert gc.get_freeze_count() == 0
    heap.hold(1)
    assert gc.get_freeze_count()
    heap.let_go(1)


@pytest.mark.slow
def test_engines_in_threads_leave_nothing_frozen():
    def run():
        hold = HeapHold()
        for turn in range(2000):
            hold.note(turn % 2 == 0)
            if turn % 500 == 0:
                gc.collect()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_takes_back_and_freezes_for_itself(model):
    one_row(model)
    if (child := os.fork()) == 0:
        status = 1
        try:
            was_frozen = gc.get_freeze_count() > 0
            gc.collect()
            was_taken_back = gc.get_freeze_count() == 0
            status = 0 if was_frozen and was_taken_back and any(one_row(model)) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_freeze_count()


def test_another_librarys_callback_hears_of_a_collection_that_takes_everything_back(heap):
    """Python walks the callbacks by number: one that goes away meanwhile would hide the next one."""
    heard = []

    def timer(phase, info):
        heard.append(phase)

    heap.hold(1)
    heap.let_go(1)
    gc.callbacks.append(timer)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(timer)
    assert heard == ["start", "stop"] and not heap.is_frozen
