"""The heap is frozen while any engine is busy, and as it was when none is, whatever ended their requests."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from support import batch, random_prompts, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import PagedConfig, PagedGenerator
from hf_paged.engine import frozen_heap
from hf_paged.engine.core import EngineCore
from hf_paged.engine.frozen_heap import FrozenHeap, HeapHold

INPUTS = batch([20, 9])


@pytest.fixture(scope="module", autouse=True)
def _nobody_else_freezes():
    """As programs are, and the test suite is not (conftest.py)."""
    gc.unfreeze()
    gc.collect()
    frozen_heap.heap._ask_again = 0.0
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def _starts_and_ends_unfrozen():
    assert gc.get_freeze_count() == 0
    yield
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


def test_a_call_freezes_the_heap_and_ends_unfrozen(model):
    frozen = one_row(model)
    assert any(frozen) and all(frozen[:-1])
    assert gc.get_freeze_count() == 0
    model.generate(**INPUTS, max_new_tokens=4)
    assert gc.get_freeze_count() == 0


def test_a_call_in_lockstep_does_as_well(model):
    watching = Watching()
    model.generate(**INPUTS, max_new_tokens=4, logits_processor=LogitsProcessorList([watching]))
    assert watching.frozen == [True] * 4


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
            seen.clear()
            generator.generate(random_prompts([12, 9]), max_new_tokens=4)
            assert seen == [("launch", False), ("commit", True), *[("launch", True), ("commit", True)] * 3]


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
    assert seen and set(seen) == {(False, True)}
    gc.collect()
    assert old() is None


def test_young_garbage_is_collected_before_it_is_frozen():
    thing = weakref.ref(Thing())
    hold = HeapHold()
    hold.note(True)
    assert thing() is None and gc.get_freeze_count()
    hold.note(False)


def test_the_heap_is_frozen_until_the_last_engine_is_idle():
    first, second = HeapHold(), HeapHold()
    first.note(True)
    second.note(True)
    first.note(True)
    first.note(False)
    assert gc.get_freeze_count()
    second.note(False)
    second.note(False)
    assert gc.get_freeze_count() == 0


def test_a_hold_that_is_gone_is_idle():
    hold = HeapHold()
    hold.note(True)
    del hold
    assert gc.get_freeze_count() == 0


def test_engines_in_threads_leave_it_unfrozen():
    models = [hf_paged.enable(tiny_model(seed), strict=True) for seed in range(3)]
    frozen = [[] for _ in models]
    inside = threading.Barrier(len(models))

    def run(model, seen):
        streamer = Streamer(lambda: len(streamer.frozen) == 3 and inside.wait(60))
        model.generate(**batch([12]), max_new_tokens=8, streamer=streamer)
        seen += streamer.frozen[2:-1]

    threads = [threading.Thread(target=run, args=pair) for pair in zip(models, frozen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen and all(seen) for seen in frozen)
    assert gc.get_freeze_count() == 0


def test_holds_that_change_in_many_threads_at_once_end_unfrozen():
    def run():
        hold = HeapHold()
        for turn in range(2000):
            hold.note(turn % 2 == 0)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.get_freeze_count() == 0


def test_what_a_caller_froze_stays_frozen(model, monkeypatch):
    monkeypatch.setattr(frozen_heap.heap, "_ask_again", 0.0)
    gc.freeze()
    try:
        thaws = []
        monkeypatch.setattr(frozen_heap.gc, "unfreeze", lambda: thaws.append(None))
        model.generate(**INPUTS, max_new_tokens=4)
        assert not thaws and gc.get_freeze_count() > 100_000
    finally:
        monkeypatch.undo()
        gc.unfreeze()
        frozen_heap.heap._ask_again = 0.0
    assert any(one_row(model))


def test_frozen_objects_of_others_are_not_counted_over_and_over(monkeypatch):
    heap, counts = FrozenHeap(), []
    monkeypatch.setattr(frozen_heap.gc, "get_freeze_count", lambda: counts.append(time.sleep(0.01)) or 5)
    assert not any(heap.may_freeze() for _ in range(10))
    assert len(counts) == 1


def test_a_caller_may_freeze_and_unfreeze_in_between(model):
    assert any(one_row(model, gc.unfreeze))
    assert gc.get_freeze_count() == 0
    one_row(model, lambda: gc.freeze() if gc.get_freeze_count() else None)
    assert gc.get_freeze_count() == 0, "what was frozen meanwhile is taken back with the rest"


def test_nothing_is_done_while_collections_are_off(model):
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


def test_collections_that_are_switched_off_in_between_do_not_keep_it_frozen(model):
    try:
        one_row(model, gc.disable)
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["streamer", "processor", "launch"])
def test_a_call_that_dies_ends_unfrozen(model, monkeypatch, error, place):
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
    assert seen and gc.get_freeze_count() == 0
    monkeypatch.undo()
    assert any(one_row(model))


def test_an_abandoned_stream_ends_unfrozen():
    with PagedGenerator(tiny_model(), config=PagedConfig(num_blocks=64)) as generator:
        stream = generator.stream(random_prompts([12, 9]), max_new_tokens=50)
        next(stream)
        assert gc.get_freeze_count()
        stream.close()
        assert gc.get_freeze_count() == 0
        stream = generator.stream(random_prompts([12, 9]), max_new_tokens=50)
        next(stream)
        del stream
        assert gc.get_freeze_count() == 0


def test_a_stream_abandoned_in_a_cycle_is_collected_once_nobody_steps(monkeypatch):
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


def test_after_a_pause_steps_freeze_it_again(model, monkeypatch):
    engine = hf_paged.get_engine(model)
    engine.add_request(random_prompts([12])[0], GenerationConfig(max_new_tokens=8))
    engine.step()
    assert gc.get_freeze_count()
    with monkeypatch.context() as patch:
        patch.setattr(frozen_heap, "_PATIENCE", 0.0)
        gc.collect()
    assert gc.get_freeze_count() == 0
    engine.step()
    assert gc.get_freeze_count()
    while engine.has_unfinished():
        engine.step()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("end", ["abort", "shutdown", "disable"])
def test_requests_that_are_ended_from_outside_end_unfrozen(model, end):
    engine = hf_paged.get_engine(model)
    name = engine.add_request(random_prompts([12])[0], GenerationConfig(max_new_tokens=50))
    engine.step()
    assert gc.get_freeze_count()
    if end == "abort":
        engine.abort(name)
    elif end == "shutdown":
        engine.shutdown()
    else:
        hf_paged.disable(model)
    assert gc.get_freeze_count() == 0


def test_a_request_that_cannot_be_added_ends_unfrozen(model, monkeypatch):
    monkeypatch.setattr(EngineCore, "scheduler_or_build", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch([12]), max_new_tokens=4)
    assert gc.get_freeze_count() == 0


def test_after_enough_was_made_python_looks_through_everything_once(monkeypatch):
    heap = FrozenHeap()
    assert heap.may_freeze()
    gc.collect(0)
    monkeypatch.setattr(frozen_heap, "_MOST_UNSEEN", gc.get_threshold()[0])
    assert not heap.may_freeze()
    heap.hold(1)
    assert gc.get_freeze_count() == 0
    gc.collect()
    heap.let_go(1)
    assert heap.may_freeze()


def test_a_full_collection_of_a_frozen_heap_is_none_of_everything(monkeypatch):
    heap = FrozenHeap()
    heap.last_use = time.monotonic()
    heap.hold(1)
    assert heap.is_frozen
    gc.collect()
    gc.collect()
    heap.let_go(1)
    monkeypatch.setattr(frozen_heap, "_MOST_UNSEEN", gc.get_threshold()[0])
    assert not heap.may_freeze()


def test_who_changes_while_another_is_at_work_waits_for_nobody(monkeypatch):
    heap, freeze = FrozenHeap(), gc.freeze

    def freeze_and_end():
        freeze()
        heap.let_go(1)  # as a collection does that comes in the middle

    monkeypatch.setattr(frozen_heap.gc, "freeze", freeze_and_end)
    heap.hold(1)
    assert not heap.is_frozen and gc.get_freeze_count() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_counts_anew():
    hold = HeapHold()
    hold.note(True)
    if (child := os.fork()) == 0:
        status = 1
        try:
            was_unfrozen = gc.get_freeze_count() == 0
            hold.note(True)
            refrozen = gc.get_freeze_count() > 0
            hold.note(False)
            status = 0 if was_unfrozen and refrozen and gc.get_freeze_count() == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_freeze_count()
    hold.note(False)


def test_tokens_are_those_of_an_engine_that_freezes_nothing(model, monkeypatch):
    tokens = model.generate(**INPUTS, max_new_tokens=8)
    monkeypatch.setattr(FrozenHeap, "may_freeze", lambda _: False)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=8), tokens)


def test_another_librarys_callback_hears_of_a_collection_that_takes_everything_back():
    """Python walks the callbacks by number: one that goes away meanwhile would hide the next one."""
    heap, heard = FrozenHeap(), []

    def timer(phase, info):
        heard.append(phase)

    heap.hold(1)
    gc.callbacks.append(timer)
    try:
        heap.last_use = time.monotonic() - 100
        gc.collect()
    finally:
        gc.callbacks.remove(timer)
    assert heard == ["start", "stop"] and not heap.is_frozen
