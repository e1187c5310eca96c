"""One caller's requests and what waits for that caller, whoever drives the engine."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_paged.detokenizer import TextStream
from hf_paged.outputs import StepOutput
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence
from hf_paged.settings import RequestSettings
from hf_paged.stopping import StopRule

if TYPE_CHECKING:
    from hf_paged.engine import Engine


@dataclass
class Request:
    """One request of a session; `sequence` is replaced by a fresh one when the engine recovers from an interrupt."""

    sequence: Sequence
    parameters: SlotParameters
    session: Session
    text: TextStream | None = None
    stop: StopRule | None = None
    num_emitted: int = 0
    error: str | None = None
    logprobs: list[float] | None = None  # of the committed output, where asked for
    prompt_logprobs: list[float | None] | None = None  # None in it: not known yet, and for the first token for good
    thread: int = field(default_factory=threading.get_ident)  # whose caller waits for it

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """True while prompt tokens have to be scored; the last one is scored last."""
        scores = self.prompt_logprobs
        return scores is not None and len(scores) > 1 and scores[-1] is None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    def restart(self) -> None:
        """Forget the output made so far; what was emitted of it is not emitted again."""
        old = self.sequence
        self.sequence = Sequence(
            old.request_id,
            old.token_ids[: old.num_prompt_tokens],
            max_new_tokens=old.max_new_tokens,
            eos_token_ids=old.eos_token_ids,
            priority=old.priority,
            cache_key=old.cache_key,
            read_cache=old.read_cache,
        )
        if self.stop is not None:
            self.stop.restart()
        self.logprobs = None if self.logprobs is None else []
        self.prompt_logprobs = None if self.prompt_logprobs is None else [None] * len(self.prompt_logprobs)


class Session:
    """With ``stream`` every token is delivered as it comes, otherwise only completions; ``text``: decoded, too."""

    def __init__(self, engine: Engine, *, stream: bool, text: bool = True) -> None:
        self._engine_ref = weakref.ref(engine)  # the engine keeps a session of its own: no cycle
        self.stream = stream
        self.text = text
        self.outbox: deque[StepOutput] = deque()
        self.open: dict[str, Request] = {}

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        assert engine is not None
        return engine

    def add(self, prompt_token_ids: list[int], settings: RequestSettings, *, seed: int, request_id: str | None = None,
            priority: int = 0, stop: StopRule | None = None) -> str:  # fmt: skip
        """Queue a checked prompt; returns the request's id. `stop`: None: made from the settings."""
        return self._engine._add(self, prompt_token_ids, settings, seed, request_id, priority, stop)

    def advance(self) -> list[StepOutput]:
        """What came in for this session, after at most one engine step. [] says nothing; see `unfinished`."""
        return self._engine._advance(self)

    def unfinished(self) -> bool:
        """True while a request is open or an output was not fetched."""
        return bool(self.open or self.outbox)

    def close(self) -> None:
        """End what is still open; every block of it is free afterwards."""
        self._engine._close(self)
