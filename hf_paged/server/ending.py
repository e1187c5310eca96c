"""Shutdown of the server: the first signal ends running answers with a reason, a second one exits at once."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SECONDS = 4.0  # maximum time from the signal to the end of the process
REASON = "the server was told to stop while this answer was being made"


class OpenAnswers:
    """Registry of running answers, each with an event that is set when the server receives a signal to stop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.is_over = False  # True after the signal to stop

    @contextmanager
    def one(self) -> Iterator[asyncio.Event]:
        """Register one answer for the duration of the context; call on the answer's event loop."""
        event = asyncio.Event()
        self._open[event] = asyncio.get_running_loop()
        if self.is_over:
            event.set()
        try:
            yield event
        finally:
            del self._open[event]

    def end(self) -> None:
        """Set the events of all current and later answers; safe in any thread and in a signal handler."""
        self.is_over = True
        for event, loop in list(self._open.items()):
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(event.set)


def ending_server(stock: Any, answers: OpenAnswers) -> Any:
    """Return a subclass of uvicorn's ``Server`` that shuts down as this module describes."""

    class EndingServer(stock):
        should_exit: bool

        def run(self, *args: Any, **kwargs: Any) -> None:
            super().run(*args, **kwargs)
            if answers.is_over:
                # Tearing torch and transformers down takes seconds, in which the watchdog thread cannot run.
                atexit._run_exitfuncs()
                _leave(0)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                _leave(128 + sig)
            self.should_exit = True
            answers.end()
            # Ends the process although a step of a large model or a thread is still running.
            watchdog = threading.Timer(SECONDS, _leave, (0,))
            watchdog.daemon = True
            watchdog.start()

    return EndingServer


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
