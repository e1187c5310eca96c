"""Forks while other threads generate; run by test_at_fork.py in a process of its own: python fork_script.py CASE."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings

import pytest
import torch
from family_models import family_model
from support import assert_idle, batch, random_prompts, stock_copy, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import Engine, PagedConfig, process_lock
from hf_paged.engine.locked_core import FairLock
from hf_paged.process_lock import ProcessCondition, ProcessLock

INPUTS, OTHERS = batch([40, 20]), batch([30, 7, 25], seed=2)
DEADLINE_S = 30.0
NUM_FORKS = 3


class Nothing(LogitsProcessor):
    """Sends a call to lockstep."""

    def __call__(self, input_ids, scores):
        return scores


def in_child(check):
    """Fork, run `check` in the child; its exit status, or "hangs"."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        status = 1
        faulthandler.dump_traceback_later(DEADLINE_S - 5.0)  # says where a child hangs
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def native(model):
    return model.generate(**OTHERS, max_new_tokens=30)


def lockstep(model):
    return model.generate(**OTHERS, max_new_tokens=30, logits_processor=LogitsProcessorList([Nothing()]))


def managed(model):
    outputs = model.generate_batch(random_prompts([30, 7]), max_new_tokens=30)
    assert all(output.is_finished() and output.error is None for output in outputs.values())


def busy(model, work, check, num_threads=2):
    """Fork while threads do `work`; every child must pass `check`, and the parent's threads go on."""
    stop, errors = threading.Event(), []

    def loop():
        try:
            while not stop.is_set():
                work(model)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=loop) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    moments, results = random.Random(0), []
    for _ in range(NUM_FORKS):
        time.sleep(moments.uniform(0.01, 0.08))
        results.append(in_child(check))
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a thread of the parent hangs"
    assert not errors, errors[0]
    return results


def checks(model):
    """In the child: native and lockstep calls, also in a new thread, give stock's tokens and leave no block taken."""
    expected = stock_copy(model).generate(**INPUTS, max_new_tokens=10)
    name = model.config._attn_implementation
    hf_paged.enable(model, strict=True)

    def check():
        assert type(model.config._attn_implementation) is str, "the config still has our name"
        assert model.config._attn_implementation == name
        found = []
        thread = threading.Thread(target=lambda: found.append(model.generate(**INPUTS, max_new_tokens=10)))
        thread.start()
        found.append(model.generate(**INPUTS, max_new_tokens=10))
        thread.join()
        with_processor = LogitsProcessorList([Nothing()])
        found.append(model.generate(**INPUTS, max_new_tokens=10, logits_processor=with_processor))
        assert all(torch.equal(tokens, expected) for tokens in found), found
        assert_idle(model)
        hf_paged.get_engine(model).release_memory()
        model.generate(**INPUTS, max_new_tokens=2)
        assert_idle(model)

    return check


def case_fused():
    model = tiny_model()
    return busy(model, native, checks(model))


def case_generic():
    model = family_model("gemma2")
    return busy(model, native, checks(model))


def case_lockstep():
    model = tiny_model()
    return busy(model, lockstep, checks(model))


def case_generic_lockstep():
    model = family_model("qwen2")
    return busy(model, lockstep, checks(model))


def case_generate_batch():
    model = tiny_model()
    check = checks(model)

    def with_batch():
        check()
        managed(model)

    return busy(model, managed, with_batch)


def case_running_manager():
    """The manager's thread is the parent's: requests of it fail in the child, and `start` makes another thread."""
    model = tiny_model()
    check = checks(model)
    manager = model.init_continuous_batching()
    manager.start()
    prompts = random_prompts([20, 30, 10])
    # Ids of other threads' requests are not fetched by the child.
    open_id = manager.add_request(random_prompts([9])[0], max_new_tokens=400)

    def work(model):
        ids = manager.add_requests(prompts, max_new_tokens=40)
        for request_id in ids:
            output = next(o for o in manager.request_id_iter(request_id) if o.is_finished())
            assert output.error is None, output.error

    def with_manager():
        assert not manager.is_running()
        failed = manager.get_result(open_id, timeout=5.0)
        assert failed is not None and ("forked" in (failed.error or "") or len(failed.generated_tokens) == 400)
        assert manager.add_request(prompts[0], max_new_tokens=3) is None, "as after any end of its thread"
        check()
        manager.start()
        request_id = manager.add_request(prompts[0], max_new_tokens=5)
        made = next(o for o in manager.request_id_iter(request_id) if o.is_finished())
        expected = stock_copy(model).generate(torch.tensor(prompts[:1]), max_new_tokens=5)
        assert made.generated_tokens == expected[0, len(prompts[0]) :].tolist()
        manager.stop(timeout=5.0)

    results = busy(model, work, with_manager, num_threads=1)
    manager.stop(hard_stop=True, timeout=DEADLINE_S)
    assert_idle(model)
    return results


class Forker:
    """A streamer that forks at its third column; the child has to finish the call, too."""

    def __init__(self):
        self.columns, self.pid = 0, None

    def put(self, value):
        self.columns += 1
        if self.columns == 4:
            self.pid = os.fork()

    def end(self):
        pass


def fork_inside(model, **options):
    """While another thread has requests in the engine; child and parent go on with the very call."""
    expected = stock_copy(model).generate(**INPUTS, max_new_tokens=10)
    hf_paged.enable(model, strict=True)
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            model.generate(**OTHERS, max_new_tokens=300)  # not done when the child is

    thread = threading.Thread(target=loop)
    thread.start()
    time.sleep(0.1)
    streamer, status = Forker(), 1
    try:
        tokens = model.generate(**INPUTS, max_new_tokens=10, streamer=streamer, **options)
        assert torch.equal(tokens, expected)
        if streamer.pid == 0:
            assert torch.equal(model.generate(**INPUTS, max_new_tokens=10), expected)
            hf_paged.get_engine(model).release_memory()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if streamer.pid == 0:
            os._exit(status)
    deadline = time.monotonic() + DEADLINE_S
    result = "hangs"
    while time.monotonic() < deadline:
        done, code = os.waitpid(streamer.pid, os.WNOHANG)
        if done:
            result = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.01)
    stop.set()
    thread.join(DEADLINE_S)
    return [status, result]


def case_streamer():
    return fork_inside(tiny_model())


def case_streamer_in_lockstep():
    return fork_inside(tiny_model(), logits_processor=LogitsProcessorList([Nothing()]))


def case_idle():
    """A fork of an idle engine, as a data loader makes it: the child begins with an empty cache, the parent's stays."""
    model = hf_paged.enable(tiny_model(), strict=True)
    prompts = {"input_ids": torch.tensor(random_prompts([64]))}
    expected = model.generate(**prompts, max_new_tokens=4)

    def check():
        before = hf_paged.get_engine(model).stats().prefix_cache_hits
        assert torch.equal(model.generate(**prompts, max_new_tokens=4), expected)
        assert hf_paged.get_engine(model).stats().prefix_cache_hits == before
        assert torch.equal(model.generate(**prompts, max_new_tokens=4), expected)
        assert hf_paged.get_engine(model).stats().prefix_cache_hits > before

    results = [in_child(check)]
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    assert torch.equal(model.generate(**prompts, max_new_tokens=4), expected)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > before
    return results


def case_ranks():
    """The child of a rank cannot speak to the others, says so, and leaves the parent's call alone."""
    with tempfile.TemporaryDirectory() as path:
        stock = tiny_model()
        stock.save_pretrained(path)
        with hf_paged.PagedGenerator.from_pretrained(path, tensor_parallel_size=2, device="cpu") as generator:
            prompts = random_prompts([20, 9])

            def check():
                group = generator.engine.group

                def reduce():
                    with group.together():
                        group.all_reduce(torch.ones(3))

                for call in (lambda: generator.generate(prompts, max_new_tokens=4),
                             lambda: generator.model.generate(**INPUTS, max_new_tokens=4),
                             lambda: group.broadcast(1), reduce):
                    with pytest.raises(hf_paged.errors.EngineClosedError, match="fork"):
                        call()

            results = [in_child(check)]
            expected = stock.generate(**INPUTS, max_new_tokens=4)
            assert torch.equal(generator.model.generate(**INPUTS, max_new_tokens=4), expected)
            return [*results, in_child(check)]


def current(lock):
    """What has to be taken of a lock of ours in this process."""
    return lock.condition if isinstance(lock, ProcessCondition) else lock.rlock


def case_steps():
    """A fork waits for another thread's step, in whose middle libraries hold locks, but for no step that hangs."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    inside, threads, moments = threading.Event(), [], []

    def step(seconds):
        with engine.lock_for_fork.rlock:
            moments.append("step")
            inside.set()
            time.sleep(seconds)
            moments.append("end of step")

    def check(expected):
        assert moments == expected, moments
        native(model)
        assert_idle(model)

    results = []
    for seconds, expected in (0.3, ["step", "end of step"]), (3.0, ["step"]):
        moments.clear()
        inside.clear()
        threads.append(threading.Thread(target=step, args=(seconds,)))
        threads[-1].start()
        inside.wait()
        begun = time.monotonic()
        results.append(in_child(lambda expected=expected: check(expected)))
        assert time.monotonic() - begun < 3.0
    for thread in threads:
        thread.join()
    native(model)  # the parent's lock is free again
    return results


def case_locks():
    """Every lock of ours is held by another thread at the fork and free in the child, whatever engines there are."""
    orphans = [Engine(tiny_model(), PagedConfig()) for _ in range(8)]  # their models are gone
    assert len(orphans) == 8
    model = hf_paged.enable(tiny_model())
    managed(model)
    held, stop = threading.Event(), threading.Event()
    locks = list(process_lock._all)
    assert {type(lock) for lock in locks} == {ProcessLock, ProcessCondition, FairLock} and len(locks) > 20

    def hold():
        taken = list(map(current, locks))
        for lock in taken:
            lock.acquire()
        held.set()
        stop.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def check():
        assert all(current(lock).acquire(blocking=False) for lock in locks)

    results = [in_child(check)]
    stop.set()
    thread.join()
    with (mine := current(locks[0])):
        results.append(in_child(lambda: mine is current(locks[0]) or sys.exit(1)))  # which the thread has to release
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork of a process with threads
    torch.set_num_threads(1)
    print("RESULTS", *globals()[f"case_{sys.argv[1]}"](), flush=True)
