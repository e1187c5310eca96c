"""Requests that an `EngineThread` runs for one caller, and the sink of their outputs."""

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
        """Hand over the outputs of a step, at least one."""
        raise NotImplementedError

    def fail(self, error: BaseException | None) -> None:
        """Report that all open requests ended without an output, by this error or (None) as the engine was closed."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the open requests, since the thread is about to end; requests that stay open fail."""
