"""A loop lets waiting threads in, and goes on where that takes long; after any interrupt the lock is free."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time

import pytest
from threads import run_threads

from hf_paged.engine.locked_core import _PATIENCE, FairLock


def spin(seconds: float) -> None:
    """Holds the interpreter, so that the threads that wait for the lock are not quick to take it."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def in_threads(count, run):
    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    run_threads(threads)


@pytest.mark.parametrize("count", [2, 3])
def test_loops_take_turns(count):
    lock, begun, order = FairLock(), threading.Barrier(count), []

    def loop(name):
        begun.wait()
        for _ in range(60):
            with lock.turn(after_others=True) as turn, lock.rlock:
                turn.leave()
                order.append(name)
                spin(0.002)

    in_threads(count, loop)
    assert sorted(order) == sorted([*range(count)] * 60)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > len(order) // 2, order
    assert not lock._waiting


def test_the_lock_is_entered_again_and_an_exception_leaves_nothing():
    lock = FairLock()
    with lock.turn() as turn, lock.rlock:
        with lock.turn(), lock.rlock:
            turn.leave()
        turn.leave()
    with pytest.raises(ValueError, match="inside"), lock.turn(), lock.rlock:
        raise ValueError("inside")
    assert not lock._waiting
    in_threads(1, lambda _: lock.rlock.acquire())


def test_turns_that_are_left_behind_cost_one_wait():
    """Of a call that was interrupted, or of threads that a fork has not."""
    lock = FairLock()
    for _ in range(3):
        lock.turn().__enter__()
    begin = time.perf_counter()
    with lock.turn(after_others=True):
        assert time.perf_counter() - begin >= _PATIENCE
        assert len(lock._waiting) == 1
    begin = time.perf_counter()
    for _ in range(100):
        with lock.turn(after_others=True):
            pass
    assert time.perf_counter() - begin < 100 * _PATIENCE / 2


def test_after_an_interrupt_at_any_moment_another_thread_gets_the_lock():
    """While the exception lives, too, as it does in a notebook."""
    lock, kept = FairLock(), []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    moments, stuck = random.Random(0), 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 4e-4))
                while True:
                    with lock.turn(after_others=True) as turn, lock.rlock:
                        turn.leave()
            except KeyboardInterrupt as error:
                kept = [error]
                got = []
                in_threads(1, lambda _, got=got: got.append(lock.rlock.acquire(timeout=5.0)) or lock.rlock.release())
                stuck += got != [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stuck == 0 and kept
