"""The thread that steps an engine for callers whose own threads must not wait for a step.

A caller submits requests in an `OutputSink`, whose sink (an event loop, a queue) gets their outputs. All calls of a
thread share its steps. The thread and other threads that step the engine take turns (`FairLock`).
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_paged.engine.engine import Engine
from hf_paged.engine.session import Session
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import StepOutput
from hf_paged.process_lock import ProcessCondition

logger = logging.getLogger(__name__)

LINGER_S = 5.0  # seconds that a thread which was started by an action waits for another one before it ends
_PARTING_S = 5.0
_RUN, _FLUSH, _NOW = 0, 1, 2  # values of `_stop`, which only rises while a thread runs
_FORKED = "the process was forked, and the thread that generates is the parent's"

_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class _MyPauses(threading.local):
    count = 0  # `pause` blocks that this thread is inside of


class OutputSink:
    """Requests in one session of an engine, and the sink of their outputs. The methods are called by `EngineThread`.

    Attributes:
        num_open: Requests that have not ended, as the thread counts them.
    """

    def __init__(self, *, stream: bool, text: bool = True) -> None:
        self.session = Session(stream=stream, text=text)
        self.num_open = 0

    def take(self, outputs: list[StepOutput]) -> None:
        """Hand over the outputs of a step, at least one."""
        raise NotImplementedError

    def fail(self, error: BaseException | None) -> None:
        """Report that all open requests ended without an output, by this error or (None) as the engine was closed."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the open requests, since the thread is about to end; requests that stay open fail."""


class EngineThread:
    """A daemon thread that steps one engine while there are requests, and waits for more.

    Args:
        find_engine: returns the engine; called when a thread starts.
        lingers: the thread starts with the first action, and ends after `LINGER_S` without one; otherwise `start` and
            `stop` start and end it.
        after_turn: called by the thread after each turn (actions and a step).
        on_end: called when a thread has ended, with the error that ended it, or None.

    Attributes:
        fatal_error: the error that ended the last thread, or None.
    """

    def __init__(self, find_engine: Callable[[], Engine], *, lingers: bool = False,
                 after_turn: Callable[[], None] = lambda: None,
                 on_end: Callable[[BaseException | None], None] = lambda error: None) -> None:
        self._find_engine, self._lingers, self._after_turn, self._on_end = find_engine, lingers, after_turn, on_end
        self._condition = ProcessCondition()
        self._actions: list[Callable[[], None]] = []
        self._calls: list[OutputSink] = []  # calls with open requests; only the thread uses this list
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None  # while a thread runs
        self._stop = _RUN
        self._num_pauses, self._is_paused = 0, False
        self._my_pauses = _MyPauses()
        self.fatal_error: BaseException | None = None
        _threads.add(self)

    @property
    def changed(self) -> threading.Condition:
        """The condition whose lock guards all state that threads share; notified of every change."""
        return self._condition.condition

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def is_running(self) -> bool:
        self.check_process()
        return self._thread is not None and self._thread.is_alive()

    @property
    def was_stopped(self) -> bool:
        """Whether `stop` was called, or the thread has ended."""
        return self._stop != _RUN

    @property
    def is_over(self) -> bool:
        """Whether no thread runs that takes actions."""
        return self._engine is None

    def start(self, stop: int = _RUN) -> None:
        """Start a thread if none runs; raises what `find_engine` raises. ``stop``: as `stop` would set it at once."""
        with self.changed:
            self._engine, self._stop, self.fatal_error = self._find_engine(), stop, None
            self._thread = threading.Thread(target=self._run, name="hf_paged engine thread", daemon=True)
            self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Have the thread call ``action`` before its next step."""
        self.check_process()
        with self.changed:
            self._actions.append(action)
            self._start_for_actions()
            self.changed.notify_all()

    def _start_for_actions(self) -> None:
        if self._lingers and self._actions and self._engine is None:
            self.start(_NOW if self._stop == _NOW else _RUN)  # the next thread lingers, however this one ended

    def stop(self, *, now: bool) -> None:
        """Have the thread end when all requests are done or, with ``now``, before the next step.

        Raises:
            RuntimeError: called by a thread that is inside of `pause`.
        """
        if self._my_pauses.count:
            raise RuntimeError("stop was called inside `pause` by the same thread: the generation loop would never end")
        with self.changed:
            self._stop = max(self._stop, _NOW if now else _FLUSH)
            self.changed.notify_all()

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of the thread; returns False if it still runs after ``timeout`` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run no step inside the block, so that the model may be changed; requests continue after the block.

        Raises:
            RuntimeError: the thread does not run, or ended before it could pause.
        """
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        mine = self._my_pauses
        with self.changed:
            self._num_pauses += 1
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self._is_paused or self.is_over)
                if self.is_over:
                    raise RuntimeError("The generation loop stopped before it could pause.") from self.fatal_error
            except BaseException:
                self._end_pause()
                raise
        mine.count += 1
        try:
            yield
        finally:
            mine.count -= 1
            self._end_pause()

    def _end_pause(self) -> None:
        with self.changed:
            self._num_pauses -= 1
            self.changed.notify_all()

    def check_process(self) -> None:
        """Drop all calls if the thread has not survived a fork, which copies no other threads to the child."""
        with self.changed:
            if self._engine is not None and self._thread is not None and not self._thread.is_alive():
                self._calls, self._actions = [], []  # their callers are threads and event loops of the parent
                self._num_pauses, self._is_paused = self._my_pauses.count, False
                self._end(RuntimeError(_FORKED))

    # -- in the thread ------------------------------------------------------------------------------------------------

    def add(self, call: OutputSink, requests: list[RequestSpec]) -> list[str | ValueError]:
        """Queue requests of a call, as `Engine.add_all` does."""
        try:
            added = self.engine.add_all(call.session, requests)
        except BaseException:
            if not call.num_open:
                self._end_requests(call)
            raise
        call.num_open += sum(isinstance(one, str) for one in added)
        if call.num_open and call not in self._calls:
            self._calls.append(call)
        return added

    def drop(self, call: OutputSink) -> None:
        """End the requests of a call, without an output."""
        if call in self._calls:
            self._calls.remove(call)
            self._end_requests(call)

    def _end_requests(self, call: OutputSink) -> None:
        session, call.session, call.num_open = call.session, Session(call.session.stream, call.session.text), 0
        try:
            self.engine.close_session(session)
        except Exception as error:  # ranks of a sharded model lost each other, which ends their requests, too
            logger.warning("hf_paged: requests of a call that is over were not ended: %r", error, exc_info=error)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (actions := self._wait()) is not None:
                for action in actions:
                    self._attempt(action)
                self._attempt(self._step)
                self._after_turn()
            if self._is_this():
                for call in list(self._calls):
                    call.stop()
                self._step()
        except BaseException as raised:
            error = raised
            logger.error("hf_paged: the thread of an engine ended by %r", raised, exc_info=raised)
        finally:
            if self._is_this():
                self._stop, self.fatal_error = max(self._stop, _FLUSH), error  # before callers get a failed output
                self._fail_calls(error)
                self._after_turn()
                self._end(error)

    def _is_this(self) -> bool:
        """Return whether this thread is the present one: after `LINGER_S` another thread may have replaced it."""
        return self._thread is threading.current_thread()

    def _wait(self) -> list[Callable[[], None]] | None:
        """Wait for work, and return the actions before the next step; returns None if the thread is to end."""
        with self.changed:
            while True:
                if self._num_pauses:
                    self._rest()
                if self._stop == _NOW:
                    return None
                if self._actions or self._calls:
                    actions, self._actions = self._actions, []
                    return actions
                if self._stop == _FLUSH:
                    return None
                if not self.changed.wait(LINGER_S if self._lingers else None) and not self._actions:
                    self._engine = self._thread = None  # under the lock, so that the next action starts another thread
                    return None

    def _rest(self) -> None:
        """Wait while any thread is inside of `pause`."""
        device: Any = self.engine.model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._is_paused = True
        self.changed.notify_all()
        self.changed.wait_for(lambda: not self._num_pauses)
        self._is_paused = False

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do a part of a turn. If the engine raises in it, all present calls fail, but no later ones."""
        try:
            work()
        except Exception as error:
            self._fail_calls(error)

    def _step(self) -> None:
        """Run one step, and hand its outputs over."""
        calls = self._calls
        if not calls:
            return
        outputs = self.engine.advance([call.session for call in calls])
        for call, made in zip(calls, outputs, strict=True):
            if made:
                call.num_open -= sum(output.completion is not None for output in made)
                call.take(made)
            if call.num_open and not call.session.unfinished():  # the engine was closed
                call.num_open = 0
                call.fail(None)
        self._calls = [call for call in self._calls if call.num_open]

    def _fail_calls(self, error: BaseException | None) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            self._end_requests(call)
            call.fail(error)

    def _end(self, error: BaseException | None) -> None:
        """Note that no thread runs, and wake all waiting threads."""
        with self.changed:
            self._stop, self.fatal_error = max(self._stop, _FLUSH), error
            self._engine = None
            if not self._lingers or self._stop == _NOW:
                self._actions = []
            if self._lingers:
                self._thread = None
            self._start_for_actions()
            self._on_end(error)
            self.changed.notify_all()


def runs_on(engine: Engine) -> bool:
    """Return whether an `EngineThread` of this process steps the engine."""
    return any(thread._engine is engine and thread.is_running() for thread in list(_threads))


@atexit.register
def _end_threads() -> None:
    """Stop all threads at exit: a daemon thread inside torch would crash the interpreter while it shuts down."""
    for thread in list(_threads):
        if thread.is_running():
            thread.stop(now=True)
            thread.join(_PARTING_S)
