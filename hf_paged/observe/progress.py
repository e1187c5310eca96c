"""Progress bar over the tokens of one `PagedGenerator.generate` call."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from hf_paged.engine.engine import Engine
from hf_paged.engine.session import Request, Session
from hf_paged.outputs import EngineStats, StepOutput

SHOWN_AFTER_S = 1.0  # delay of the bar if the caller leaves it open whether to show one
_INTERVAL_S = 0.5  # between two reads of the requests, and between two redraws
_MOST_OF_TIME = 0.02  # maximum share of time for reading the requests
_PARTING_S = 2.0
_FORM = "{desc}: {percentage:3.0f}%|{bar}| "  # the total is 1, since a notebook's bar keeps its first one


class TokenCount:
    """Counts the new tokens of a call's requests, and their current maximum.

    An unfinished request counts with its limit, also before it starts; a finished one with its new tokens.

    Attributes:
        made: New tokens at the last `look`.
        most: `made` if all unfinished requests reached their limits.
    """

    def __init__(self, requests: dict[str, Request]) -> None:
        self._open = dict(requests)
        self._made_by_ended = 0
        self._first: tuple[float, int] | None = None  # when the first tokens were there, and their number
        self.made = self.num_ended = 0
        self.most = sum(map(_limit, self._open.values()))

    def end(self, output: StepOutput) -> None:
        """Count the last output of a request, or of a prompt that could not become a request."""
        request = self._open.pop(output.request_id, None)
        made = len(output.new_token_ids)
        self.num_ended += 1
        self._made_by_ended += made
        self.most += made - (0 if request is None else _limit(request))

    def rate(self, now: float) -> float | None:
        """Return the tokens per second since the first ones, before which kernels are compiled; None if unknown."""
        if self._first is None:
            self._first = (now, self.made) if self.made else None
            return None
        since, before = self._first
        return (self.made - before) / (now - since) if now > since and self.made > before else None

    def look(self, requests: dict[str, Request]) -> None:
        """Count again; ``requests``: the session's unfinished requests, which may be new objects."""
        self._open.update((name, requests[name]) for name in self._open.keys() & requests.keys())
        running = sum(one.sequence.num_output_tokens - one.num_emitted for one in self._open.values())
        self.made = self._made_by_ended + running


def _limit(request: Request) -> int:
    """Return a request's maximum of new tokens, by its settings or by what `max_model_len` leaves."""
    return max(request.row.max_length - len(request.spec.prompt) - request.num_emitted, 0)


class _State(NamedTuple):
    """Content of the bar, from the last read of the requests."""

    at: float
    made: int
    most: int
    num_ended: int
    rate: float | None
    engine: dict[str, float]  # as `activity` returns

    def text(self, num_requests: int, since: float, now: float) -> str:
        """Return the text after the bar while requests run."""
        left = "?"
        if self.rate:
            left = tqdm.format_interval(max((self.most - self.made) / self.rate - (now - self.at), 0.0))
        speed = "" if self.rate is None else f"{self.rate:,.0f} tok/s, "
        return (f"{self.made:,}/{self.most:,} tok [{tqdm.format_interval(now - since)}<{left}, {speed}"
                f"{self.num_ended:,}/{num_requests:,} done, {self.engine['num_running']} running, "
                f"KV {self.engine['kv_used']:.0%}, hits {self.engine['hit_rate']:.0%}]")


class _Screen:
    """Standard error that ignores errors: a write that raised would leave tqdm's lock held for ever."""

    def __init__(self) -> None:
        self._file = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with suppress(Exception):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(Exception):
            self._file.flush()


class Progress:
    """A bar over the new tokens of one call, shown before the call's work begins.

    A thread redraws the bar, so that its clock keeps running while the caller's thread reads prompts, prepares weights
    or compiles kernels.

    Args:
        show: Whether to show the bar; None shows it after `SHOWN_AFTER_S`.
    """

    def __init__(self, engine: Engine, show: bool | None) -> None:
        self._engine, self._show = engine, show
        self._began = self._next = time.monotonic()
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._before: EngineStats | None = None
        self._count: TokenCount | None = None
        self._state: _State | None = None
        self._bar: Any = None
        self._is_running = threading.Lock()  # held during the call; a fork could copy an Event's inner lock held
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._show is False:
            return self
        if self._show:
            with suppress(Exception):  # as in `_redraw`
                self._draw()
        self._is_running.acquire()
        wait = _INTERVAL_S if self._show else SHOWN_AFTER_S
        # The context associates the bar with the notebook cell.
        self._thread = threading.Thread(target=copy_context().run, name="hf_paged-progress", daemon=True,
                                        args=(_redraw, weakref.ref(self), self._is_running, wait))
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: continue without a bar
            self._thread = None
            self._close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is None:
            return
        self._is_running.release()
        if self._bar is None and time.monotonic() < self._began + SHOWN_AFTER_S:
            return  # the thread has drawn nothing and will not; a short call does not wait for it
        self._thread.join(_PARTING_S)
        self._close()

    def _close(self) -> None:
        if self._bar is None:
            return
        with suppress(Exception):  # as in `_redraw`
            if self._count is None:  # removes the bar of a call that did not begin; a notebook hides full bars only
                self._bar.leave, self._bar.n = False, self._bar.total
            else:
                self._look()
                self._set(self._totals())
            self._bar.close()  # draws the bar for the last time

    def begin(self, session: Session, num_requests: int) -> None:
        """Follow a session, which has all requests before the first `step`; ``num_requests`` counts refused ones."""
        self._requests, self._num_requests = session.open, num_requests

    def step(self, outputs: Iterable[StepOutput]) -> None:
        """Count the last outputs of requests that finished in a step, or before the first one."""
        if self._thread is None:
            return
        if self._count is None:
            self._before, self._count = self._engine.stats(), TokenCount(self._requests)
        for output in outputs:
            self._count.end(output)
        if (now := time.monotonic()) >= self._next:
            self._look()
            self._next = now + max(_INTERVAL_S, (time.monotonic() - now) / _MOST_OF_TIME)

    def _look(self) -> None:
        count, before = self._count, self._before
        if count is None or before is None:
            return
        with self._engine.between_steps():
            count.look(self._requests)
            stats = self._engine.stats()
        now = time.monotonic()
        self._state = _State(now, count.made, count.most, count.num_ended, count.rate(now),
                             activity(before, stats, max(now - self._began, 1e-9)))

    def _draw(self) -> None:
        state, now = self._state, time.monotonic()
        text = f"preparing requests [{tqdm.format_interval(now - self._began)}]"
        if state is not None:
            text = state.text(self._num_requests, self._began, now)
        if self._bar is None:
            self._bar = tqdm(total=1.0, desc="hf_paged", bar_format=_FORM + text, file=_Screen())
        self._set(text)
        self._bar.refresh()

    def _set(self, text: str) -> None:
        state, self._bar.bar_format = self._state, _FORM + text
        if state is not None:
            self._bar.n = state.made / state.most if state.most else 1.0

    def _totals(self) -> str:
        """Return the text after the bar at the end of the call."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        ended, made = (0, 0) if self._state is None else (self._state.num_ended, self._state.made)
        some = "" if ended == self._num_requests else f"{ended:,} of "
        requests = f"{self._num_requests:,} request{'' if self._num_requests == 1 else 's'}"
        return f"{some}{requests}, {made:,} tokens in {seconds:,.1f} s, {made / seconds:,.0f} tok/s"


def _redraw(progress: weakref.ref[Progress], is_running: threading.Lock, wait: float) -> None:
    """Redraw the bar (in its thread) until the call ends, or until an interrupt has deleted the `Progress`."""
    while not is_running.acquire(timeout=wait):
        found = progress()
        if found is None:
            return
        with suppress(Exception):  # the terminal may be closed: continue without a bar
            found._draw()
        del found
        wait = _INTERVAL_S


def activity(before: EngineStats, now: EngineStats, seconds: float) -> dict[str, float]:
    """Return the rates between two readings, and values at the second one; `seconds` must be positive.

    Keys: prompt tokens computed (``prefill_per_second``) and tokens generated (``generated_per_second``); requests
    (``num_running``, ``num_waiting``) and the share of KV blocks in use (``kv_used``) at the second reading; the share
    of looked-up prompt tokens that were in the prefix cache (``hit_rate``); and ``num_preemptions``.
    """
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return {
        "prefill_per_second": (now.num_prefill_tokens - before.num_prefill_tokens) / seconds,
        "generated_per_second": (now.num_generated_tokens - before.num_generated_tokens) / seconds,
        "num_running": now.num_running, "num_waiting": now.num_waiting,
        "kv_used": now.num_used_blocks / max(now.num_blocks - 1, 1),
        "hit_rate": hits / queries if queries else 0.0,
        "num_preemptions": now.num_preemptions - before.num_preemptions,
    }
