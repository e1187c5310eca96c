"""Progress of one call of `PagedGenerator.generate`: a bar over the tokens that the call makes."""

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
from hf_paged.integration.activity import Activity, activity
from hf_paged.outputs import EngineStats, StepOutput

SHOWN_AFTER_S = 1.0  # where the caller did not say whether to show the bar
_INTERVAL_S = 0.5  # between two looks at the requests, and between two redraws
_MOST_OF_TIME = 0.02  # that looking at the requests may take
_PARTING_S = 2.0
_FORM = "{desc}: {percentage:3.0f}%|{bar}| "  # the total is 1, since a notebook's bar keeps its first one


class TokenCount:
    """Counts the new tokens of a call's requests, and the most that there can be as things stand.

    An unfinished request counts with its limit, whether it has begun or not; a finished one with what it made.

    Attributes:
        made: new tokens so far, as of the last `look`.
        most: `made` once all unfinished requests have reached their limits.
        num_ended: completions that are there.
    """

    def __init__(self, requests: dict[str, Request]) -> None:
        self._open = dict(requests)
        self._made_by_ended = 0
        self.made = self.num_ended = 0
        self.most = sum(map(_limit, self._open.values()))

    def end(self, output: StepOutput) -> None:
        """Count the last output of a request, or of a prompt that never became one."""
        request = self._open.pop(output.request_id, None)
        made = len(output.new_token_ids)
        self.num_ended += 1
        self._made_by_ended += made
        self.most += made - (0 if request is None else _limit(request))

    def look(self, requests: dict[str, Request]) -> None:
        """Count anew; ``requests``: the session's unfinished ones, in which an object may have been replaced."""
        self._open.update((name, requests[name]) for name in self._open.keys() & requests.keys())
        running = sum(one.sequence.num_output_tokens - one.num_emitted for one in self._open.values())
        self.made = self._made_by_ended + running


def _limit(request: Request) -> int:
    """New tokens of a request at most: by its settings, or by what `max_model_len` leaves."""
    lengths = request.parameters
    return max(lengths.max_length - lengths.prompt_length - request.num_emitted, 0)


class Rate:
    """Tokens a second since the first ones were seen: preparing and compiling, before them, say nothing of the rest."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def at(self, now: float, made: int) -> float | None:
        """The rate at this time; None while it is not known."""
        if self._first is None:
            self._first = (now, made) if made else None
            return None
        (since, before) = self._first
        return (made - before) / (now - since) if now > since and made > before else None


class _State(NamedTuple):
    """What the bar shows of a moment at which the requests were looked at."""

    at: float
    made: int
    most: int
    num_ended: int
    rate: float | None
    engine: Activity

    def text(self, num_requests: int, since: float, now: float) -> str:
        """What stands behind the bar while requests run."""
        left = "?"
        if self.rate:
            left = _clock(max((self.most - self.made) / self.rate - (now - self.at), 0.0))
        speed = "" if self.rate is None else f"{self.rate:,.0f} tok/s, "
        return (f"{self.made:,}/{self.most:,} tok [{_clock(now - since)}<{left}, {speed}"
                f"{self.num_ended:,}/{num_requests:,} done, {self.engine.num_running} running, "
                f"KV {self.engine.kv_used:.0%}, hits {self.engine.hit_rate:.0%}]")


class _Screen:
    """Standard error, as long as there is one. A write that raises would leave tqdm's lock held for ever."""

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

    A thread redraws it, so that the bar comes and its clock goes on whatever the caller's thread is busy with: reading
    prompts and settings, preparing weights, compiling kernels.

    Args:
        engine: runs the requests.
        show: None: after `SHOWN_AFTER_S`.
    """

    def __init__(self, engine: Engine, show: bool | None) -> None:
        self._engine, self._show = engine, show
        self._began = self._next = time.monotonic()
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._before: EngineStats | None = None
        self._count: TokenCount | None = None
        self._rate = Rate()
        self._state: _State | None = None
        self._bar: Any = None
        self._is_running = threading.Lock()  # held until the call is over; no event, whose lock a fork could catch held
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._show is False:
            return self
        if self._show:
            with suppress(Exception):  # as in `_redraw`
                self._draw()
        self._is_running.acquire()
        wait = _INTERVAL_S if self._show else SHOWN_AFTER_S
        # The context tells a notebook to which cell the bar belongs.
        self._thread = threading.Thread(target=copy_context().run, name="hf_paged-progress", daemon=True,
                                        args=(_redraw, weakref.ref(self), self._is_running, wait))
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: the call goes on without a bar
            self._thread = None
            self._close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is None:
            return
        self._is_running.release()
        if self._bar is None and time.monotonic() < self._began + SHOWN_AFTER_S:
            return  # the thread has not come to draw, and will not: a short call does not wait for its end
        self._thread.join(_PARTING_S)
        self._close()

    def _close(self) -> None:
        if self._bar is None:
            return
        with suppress(Exception):  # as in `_redraw`
            if self._count is None:  # nothing stays of a call that did not begin; a notebook hides full bars alone
                self._bar.leave, self._bar.n = False, self._bar.total
            else:
                self._look()
                self._set(self._totals())
            self._bar.close()  # which draws the bar for the last time

    def begin(self, session: Session, num_requests: int) -> None:
        """Follow a session, to which all requests will be added before the first `step`.

        Args:
            num_requests: of the call, those that cannot run among them.
        """
        self._requests, self._num_requests = session.open, num_requests

    def step(self, outputs: Iterable[StepOutput]) -> None:
        """Take in the last outputs that a step brought, or that came before the first one."""
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
        self._state = _State(now, count.made, count.most, count.num_ended, self._rate.at(now, count.made),
                             activity(before, stats, max(now - self._began, 1e-9)))

    def _draw(self) -> None:
        state, now = self._state, time.monotonic()
        text = f"preparing requests [{_clock(now - self._began)}]"
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
        """What stands behind the bar when the call is over."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        ended, made = (0, 0) if self._state is None else (self._state.num_ended, self._state.made)
        some = "" if ended == self._num_requests else f"{ended:,} of "
        requests = f"{self._num_requests:,} request{'' if self._num_requests == 1 else 's'}"
        return f"{some}{requests}, {made:,} tokens in {seconds:,.1f} s, {made / seconds:,.0f} tok/s"


def _redraw(progress: weakref.ref[Progress], is_running: threading.Lock, wait: float) -> None:
    """The thread: draw until the call is over, or an interrupt took it before it could say so."""
    while not is_running.acquire(timeout=wait):
        found = progress()
        if found is None:
            return
        with suppress(Exception):  # no terminal any more: the call goes on without a bar
            found._draw()
        del found
        wait = _INTERVAL_S


def _clock(seconds: float) -> str:
    """As "02:05" or "1:02:05"."""
    return tqdm.format_interval(seconds)
