"""SIGINT that is held back comes later, and comes once; where nothing holds it back it is the user's as ever."""

from __future__ import annotations

import signal
import threading

import pytest

from hf_paged.engine.ranks import interrupts


@pytest.fixture(autouse=True)
def handler():
    """The default handler, which a runner in the background may have switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_it_comes_at_the_end_of_the_outermost_body():
    done = []

    def work():
        with interrupts.held_back():
            with interrupts.held_back():
                ctrl_c()
                ctrl_c()
                done.append("inner")
            done.append("outer")
        done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_it_comes_where_it_is_looked_for_and_not_again():
    with interrupts.held_back():
        interrupts.check()
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()


def test_nothing_interrupts_what_it_unwinds():
    done = []

    def work():
        try:
            with interrupts.let_through():
                try:
                    ctrl_c()
                    done.append("behind")
                finally:
                    ctrl_c()
                    done.append("unwound inside")
        finally:
            with interrupts.held_back():
                ctrl_c()
            done.append("unwound")

    with pytest.raises(KeyboardInterrupt), interrupts.held_back():
        work()
    assert done == ["unwound inside", "unwound"]


def test_the_users_code_inside_is_interrupted_at_once_and_calls_of_it_are_not():
    done = []

    def work():
        with interrupts.held_back():
            ctrl_c()
            done.append("a call")
        done.append("behind it")

    with pytest.raises(KeyboardInterrupt), interrupts.held_back(), interrupts.let_through():
        work()
    assert done == ["a call"]
    with interrupts.held_back():
        ctrl_c()
        with pytest.raises(KeyboardInterrupt), interrupts.let_through():
            done.append("not begun")
    assert done == ["a call"]


def test_users_code_that_catches_an_error_of_a_call_is_interrupted_as_before():
    with interrupts.held_back(), interrupts.let_through():
        with pytest.raises(ValueError, match="a call's"), interrupts.held_back():
            raise ValueError("a call's")
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_another_error_does_not_swallow_it():
    def work():
        ctrl_c()
        raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught, interrupts.held_back():
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_second_one_after_a_while_is_not_held_back(monkeypatch):
    """Something hangs: the user would have no way out."""
    now, done = [0.0], []
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])

    def hang():
        with interrupts.held_back():
            ctrl_c()
            now[0] = interrupts._PATIENCE - 0.1
            ctrl_c()
            done.append("held back")
            now[0] = interrupts._PATIENCE + 0.1
            ctrl_c()
            done.append("not interrupted")

    with pytest.raises(KeyboardInterrupt):
        hang()
    assert done == ["held back"]


def test_a_handler_of_the_users_own_is_called_and_stays():
    called = []
    signal.signal(signal.SIGINT, own := lambda *args: called.append(args))
    with interrupts.held_back():
        ctrl_c()
        assert called == []
        with interrupts.let_through():
            assert len(called) == 1
            ctrl_c()
            ctrl_c()
        assert len(called) == 3
        ctrl_c()
    assert len(called) == 4 and called[0][0] == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_no_python_code_handles_is_left_alone(ignored):
    signal.signal(signal.SIGINT, ignored)
    with interrupts.held_back():
        assert signal.getsignal(signal.SIGINT) is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_leave_it_to_the_main_thread(handler):
    seen = []

    def work():
        with interrupts.held_back(), interrupts.let_through():
            interrupts.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
