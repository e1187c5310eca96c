"""The end of a server by a signal: answers under way end with a reason, then the process ends; by a second one at once.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SECONDS = 4.0  # from the signal to the end of the process, at most
REASON = "the server was told to stop while this answer was being made"


class OpenAnswers:
    """Events of the answers under way, which are set when the server is told to stop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.is_over = False  # was the server told to stop?

    @contextmanager
    def one(self) -> Iterator[asyncio.Event]:
        """An answer is made in here; on its event loop."""
        event = asyncio.Event()
        self._open[event] = asyncio.get_running_loop()
        if self.is_over:
            event.set()
        try:
            yield event
        finally:
            del self._open[event]

    def end(self) -> None:
        """Set the events of all answers, also of those to come. From any thread, and from a signal's handler."""
        self.is_over = True
        for event, loop in list(self._open.items()):
            with suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(event.set)


def ending_server(stock: Any, answers: OpenAnswers) -> Any:
    """A class like uvicorn's ``Server``, which ends as this module says, and leaves the signal at that."""

    class EndingServer(stock):
        should_exit: bool

        def run(self, *args: Any, **kwargs: Any) -> None:
            super().run(*args, **kwargs)
            if answers.is_over:
                # Python takes seconds to tear torch and transformers down, and no thread could end that.
                atexit._run_exitfuncs()
                _leave(0)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                _leave(128 + sig)
            self.should_exit = True
            answers.end()
            # Whatever else still runs then: a step of a large model, a thread that does not end.
            watchdog = threading.Timer(SECONDS, _leave, (0,))
            watchdog.daemon = True
            watchdog.start()

    return EndingServer


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
