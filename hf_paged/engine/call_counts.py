"""Which path the calls of one engine's model took, counted, and of which reasons somebody was warned."""

from __future__ import annotations

from hf_paged.errors import Reason
from hf_paged.outputs import PATHS, CallStats
from hf_paged.process_lock import ProcessLock


class CallCounts:
    """Thread-safe. Reasons of one kind are one."""

    def __init__(self) -> None:
        self._lock = ProcessLock()  # a stream that is garbage-collected while a call is counted is counted itself
        self._counts: dict[tuple[str, str | None], tuple[int, int]] = {}
        self._warned: set[str] = set()

    def add(self, path: str, reason: Reason | None, num_tokens: int) -> None:
        """One call that took `path` for `reason` (None: natively) and returned so many new tokens."""
        key = path, None if reason is None else reason.kind
        with self._lock.rlock:
            calls, tokens = self._counts.get(key, (0, 0))
            self._counts[key] = calls + 1, tokens + num_tokens

    def stats(self) -> dict[str, CallStats]:
        """By path, all of `PATHS`."""
        with self._lock.rlock:
            counts = dict(self._counts)
        return {path: self._of_path(path, counts) for path in PATHS}

    @staticmethod
    def _of_path(path: str, counts: dict[tuple[str, str | None], tuple[int, int]]) -> CallStats:
        found = {reason: CallStats(*count, {}) for (of, reason), count in counts.items() if of == path}
        return CallStats(
            sum(count.num_calls for count in found.values()), sum(count.num_tokens for count in found.values()),
            {reason: count for reason, count in found.items() if reason is not None},
        )

    def is_first_warning(self, reason: Reason) -> bool:
        """True once for each kind of reason."""
        with self._lock.rlock:
            is_first = reason.kind not in self._warned
            self._warned.add(reason.kind)
        return is_first

    def take_warning_back(self, reason: Reason) -> None:
        """The warning became an exception: who catches it is to get it again."""
        with self._lock.rlock:
            self._warned.discard(reason.kind)
