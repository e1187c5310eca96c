"""Requests that an `EngineThread` runs for one caller, and where their outputs go."""

from __future__ import annotations

from hf_paged.engine.session import Session
from hf_paged.outputs import StepOutput


class EngineCall:
    """Requests in one session of an engine, and the sink of their outputs. The methods are called by `EngineThread`.

    Attributes:
        num_open: Requests that have not ended, as the thread counts them.
    """

    def __init__(self, *, stream: bool, text: bool = True) -> None:
        self.session = Session(stream=stream, text=text)
        self.num_open = 0

    def take(self, outputs: list[StepOutput]) -> None:
        """Hand over what a step brought, at least one output."""
        raise NotImplementedError

    def fail(self, error: BaseException | None) -> None:
        """Say that all open requests have ended without an output, by this error; None: the engine was closed."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask for the end of all open requests, since the thread is to end; those that then are open fail."""
