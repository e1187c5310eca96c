"""A thread that steps an engine for calls of event loops, whose own threads must not wait for a step.

A call hands its requests over and gets its outputs on the event loop that it was made on. All calls of an engine, of
whatever loops, share the thread, so that their requests share steps; and the thread takes part in the turns of threads
that step the engine themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Callable

from hf_paged.engine.engine import Engine
from hf_paged.engine.session import NewRequest, Session
from hf_paged.errors import EngineClosedError
from hf_paged.outputs import StepOutput
from hf_paged.process_lock import ProcessCondition

logger = logging.getLogger(__name__)

LINGER_S = 5.0  # for which a thread without work waits for more
_PARTING_S = 5.0
CLOSED = "the generator was closed, or its model disabled, while this call ran: make another PagedGenerator"

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class DrivenCall:
    """The requests of one call, and their outputs on the event loop that was running when it was made.

    Only that loop's thread uses it; `Driver` reads `session`, `loop` and what only the thread that drives changes.
    """

    def __init__(self, driver: Driver, *, stream: bool) -> None:
        self.session = Session(stream=stream)
        self.loop = asyncio.get_running_loop()
        self.num_open = 0  # kept by the thread that drives
        self.driver = driver
        self._added: asyncio.Future[list[str | ValueError]] = self.loop.create_future()
        self._outputs: list[StepOutput] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    async def add(self, requests: list[NewRequest]) -> list[str | ValueError]:
        """Queue the requests of the call, once: of each its id, or what is wrong with it; as `Engine.add_all`."""
        self.driver.open(self, requests)
        return await self._added

    async def outputs(self) -> list[StepOutput]:
        """Those that came since the last time, once there are any; an empty list after the last one.

        Raises:
            EngineClosedError: the engine was closed before.
            Exception: what the engine raised in a step, which ended the requests of every call that it was driven for.
        """
        while not self._outputs and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def close(self) -> None:
        """End what is still running, before the next step; waits for nothing."""
        if not self._is_over:
            self.driver.close(self)

    def receive(self, added: list[str | ValueError] | None, outputs: list[StepOutput], error: BaseException | None,
                is_over: bool) -> None:
        """What the thread that drives has to say, on the call's own loop."""
        self._outputs += outputs
        self._error, self._is_over = error or self._error, self._is_over or is_over
        if not self._added.done():
            if error is not None:
                self._added.set_exception(error)
            elif added is not None:
                self._added.set_result(added)
        self._changed.set()


class Driver:
    """Steps one engine in a thread of its own, which starts with the first call and ends after a time without any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._condition = ProcessCondition()
        self._wishes: list[Callable[[], None]] = []  # of calls, for the thread
        self._calls: list[DrivenCall] = []  # the thread's own
        self._news: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}  # the thread's own
        self._thread: threading.Thread | None = None
        self._is_ended = False
        _drivers.add(self)

    @property
    def _changed(self) -> threading.Condition:
        return self._condition.condition

    def call(self, *, stream: bool) -> DrivenCall:
        """A call without requests as yet, of the running event loop. With ``stream`` every token is an output."""
        return DrivenCall(self, stream=stream)

    def open(self, call: DrivenCall, requests: list[NewRequest]) -> None:
        """Have the thread add a call's requests before its next step."""
        self._wish(lambda: self._open(call, requests))

    def close(self, call: DrivenCall) -> None:
        """Have the thread end a call's requests before its next step."""
        self._wish(lambda: self._close(call))

    def end(self) -> None:
        """No call comes any more: the thread ends with the calls that there are."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """End all calls, and wait for the end of the thread."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._wish(self._close_all)
            self.end()
            thread.join(_PARTING_S)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wish(self, wish: Callable[[], None]) -> None:
        with self._changed:
            if self._thread is not None and not self._thread.is_alive():  # in a forked child it is the parent's
                self._wishes, self._calls, self._news, self._thread = [], [], {}, None
            self._wishes.append(wish)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hf_paged-driver", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._calls and not self._wishes and not self._is_ended:
                    self._changed.wait(LINGER_S)
                wishes, self._wishes = self._wishes, []
                if not wishes and not self._calls:
                    self._thread = None
                    return
            for wish in wishes:
                wish()
            if self._calls:
                self._step()
            self._deliver()

    def _open(self, call: DrivenCall, requests: list[NewRequest]) -> None:
        try:
            added = self._engine.add_all(call.session, requests)
        except BaseException as error:  # it is the caller's
            self._end_requests(call)
            self._tell(call, error=error, is_over=True)
            return
        call.num_open = sum(isinstance(one, str) for one in added)
        if call.num_open:
            self._calls.append(call)
        self._tell(call, added=added, is_over=not call.num_open)

    def _close(self, call: DrivenCall) -> None:
        if call in self._calls:
            self._calls.remove(call)
            self._end_requests(call)

    def _close_all(self) -> None:
        for call in list(self._calls):
            self._close(call)
            self._tell(call, error=EngineClosedError(CLOSED), is_over=True)

    def _end_requests(self, call: DrivenCall) -> None:
        try:
            self._engine.close_session(call.session)
        except Exception as error:  # a sharded model's ranks lost each other: they are gone, and the requests with them
            logger.warning("hf_paged: requests of a call that is over were not ended: %r", error, exc_info=error)

    def _step(self) -> None:
        """One step, and its outputs to their calls. Where it raises, every call ends with that."""
        calls = self._calls
        try:
            outputs = self._engine.advance([call.session for call in calls])
        except BaseException as error:
            self._calls = []
            for call in calls:
                self._end_requests(call)
                self._tell(call, error=error, is_over=True)
            return
        for call, made in zip(calls, outputs, strict=True):
            if made:
                call.num_open -= sum(output.completion is not None for output in made)
                self._tell(call, outputs=made, is_over=not call.num_open)
        if self._engine.is_shut_down:
            for call in calls:
                if call.num_open and not call.session.unfinished():  # they ended without an output
                    call.num_open = 0
                    self._tell(call, error=EngineClosedError(CLOSED), is_over=True)
        if self._news:
            self._calls = [call for call in calls if call.num_open]

    def _tell(self, call: DrivenCall, *, added: list[str | ValueError] | None = None,
              outputs: list[StepOutput] | None = None, error: BaseException | None = None, is_over: bool) -> None:
        self._news.setdefault(call.loop, []).append(lambda: call.receive(added, outputs or [], error, is_over))

    def _deliver(self) -> None:
        """Hand everything over, each loop's together; a loop that is closed ends the requests of its calls."""
        news, self._news = self._news, {}
        for loop, receivers in news.items():
            try:
                loop.call_soon_threadsafe(_call_all, receivers)
            except RuntimeError:
                for call in [call for call in self._calls if call.loop is loop]:
                    self._close(call)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


@atexit.register
def _end_threads() -> None:
    """A daemon thread inside torch while the interpreter goes down would bring the process down with an error."""
    for driver in list(_drivers):
        driver.give_up()
