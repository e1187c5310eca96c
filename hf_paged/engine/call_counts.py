"""Counts of calls by path (native, lockstep, stock), and the reasons for which a warning was given."""

from __future__ import annotations

from hf_paged.errors import Reason
from hf_paged.outputs import PATHS, CallStats
from hf_paged.process_lock import ProcessLock


class CallCounts:
    """Counts of the calls of one engine's model. Thread-safe; reasons of one kind count as one."""

    def __init__(self) -> None:
        self._lock = ProcessLock()  # reentrant: garbage collection inside `add` may end a stream, which is counted, too
        self._counts: dict[tuple[str, str | None], tuple[int, int]] = {}
        self._warned: set[str] = set()

    def add(self, path: str, reason: Reason | None, num_tokens: int) -> None:
        """Count a call that took `path` for `reason` (None if native) and returned ``num_tokens`` new tokens."""
        key = path, None if reason is None else reason.kind
        with self._lock.rlock:
            calls, tokens = self._counts.get(key, (0, 0))
            self._counts[key] = calls + 1, tokens + num_tokens

    def stats(self) -> dict[str, CallStats]:
        """Return the counts of every path in `PATHS`."""
        with self._lock.rlock:
            counts = dict(self._counts)
        stats = {path: CallStats(0, 0, {}) for path in PATHS}
        for (path, reason), (calls, tokens) in counts.items():
            of = stats[path]
            by_reason = of.by_reason if reason is None else {**of.by_reason, reason: CallStats(calls, tokens, {})}
            stats[path] = CallStats(of.num_calls + calls, of.num_tokens + tokens, by_reason)
        return stats

    def is_first_warning(self, reason: Reason) -> bool:
        """Return whether this is the first call for this kind of reason."""
        with self._lock.rlock:
            is_first = reason.kind not in self._warned
            self._warned.add(reason.kind)
        return is_first

    def take_warning_back(self, reason: Reason) -> None:
        """Forget a warning that a filter turned into an exception, so that the next call raises it again."""
        with self._lock.rlock:
            self._warned.discard(reason.kind)
