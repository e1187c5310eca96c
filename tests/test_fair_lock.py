"""A loop lets in who waits, and goes on where that takes long."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from hf_paged.fair_lock import FairLock


def spin(seconds: float) -> None:
    """Holds the interpreter, so that the threads that wait for the lock are not quick to take it."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def loops(count: int, turns: int) -> list[int]:
    """The order in which `count` threads took their turns, of 2 ms each, once all have begun."""
    lock, begun, order = FairLock(), threading.Barrier(count), []

    def loop(name: int) -> None:
        begun.wait()
        for _ in range(turns):
            with lock.held(after_others=True):
                order.append(name)
                spin(0.002)

    threads = [threading.Thread(target=loop, args=(name,)) for name in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return order


@pytest.mark.parametrize("count", [2, 3])
def test_loops_take_turns(count):
    order = loops(count, 60)
    assert sorted(order) == sorted([*range(count)] * 60)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > len(order) // 2, order


def test_a_thread_holds_it_again_and_an_exception_lets_it_go():
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock.held(), lock.held(after_others=True):
        raise ValueError("inside")
    taken = []
    thread = threading.Thread(target=lambda: taken.extend([1 for _ in [0] if lock.held().__enter__() is None]))
    thread.start()
    thread.join(10)
    assert taken == [1]


def test_a_holder_that_takes_long_is_waited_for_a_moment_only():
    """Who waits behind a long call does not stop the loop that has the lock from going on when patience ends."""
    lock, entered, over = FairLock(), threading.Event(), threading.Event()

    def long_call() -> None:
        with lock.held():
            entered.set()
            over.wait(10)

    holder, waiter = threading.Thread(target=long_call), threading.Thread(target=lambda: lock.held().__enter__())
    holder.start()
    entered.wait(10)
    waiter.start()
    while not lock._waiting:
        time.sleep(0.001)
    threading.Timer(0.2, over.set).start()
    start = time.perf_counter()
    context = lock.held(after_others=True)
    with context:
        assert time.perf_counter() - start < 5.0
    holder.join(10)
    waiter.join(10)
