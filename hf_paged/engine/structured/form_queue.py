"""The order in which more forms than processes are compiled, so that short ones do not wait for long ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_paged.options.structured import Structured

TURN = 0.25  # seconds that a compilation runs before another one may take its place


@dataclass(eq=False)
class Job:
    """A form to be compiled.

    Attributes:
        number: the number that identifies the job.
        vocabulary: the number of its vocabulary.
        seconds: its time limit.
        started: when its process began, by `time.monotonic`; None while it waits.
        process: the process that compiles it.
    """

    number: int
    vocabulary: int
    structured: Structured
    seconds: float
    started: float | None = None
    process: Any = None


class Changes(NamedTuple):
    """Jobs whose state changes now: late ones that end, stopped ones that another job replaces, and begun ones."""

    late: list[Job]
    stopped: list[Job]
    begun: list[Job]


class FormQueue:
    """Jobs in the order in which they get a place.

    A job that has not run yet goes first, and replaces a slow job (which has run for more than `TURN`); that one begins
    again later. One slow job always keeps its place, so that each ends some time. Of several jobs that have not run
    yet, the newest and the oldest are next alternately: a short job does not wait for all slow jobs before it, and an
    old job does not wait for ever.

    Args:
        places: jobs that run at the same time, at least two.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._fresh: deque[Job] = deque()
        self._is_last_next = False
        self._slow: list[Job] = []
        self.running: list[Job] = []

    def add(self, job: Job) -> None:
        self._fresh.append(job)

    def remove(self, job: Job) -> None:
        for jobs in (self._fresh, self._slow, self.running):
            if job in jobs:
                jobs.remove(job)

    def change(self, now: float) -> Changes:
        """Update the queue for the time ``now``, and return the changes, which the caller has to carry out."""
        late = [job for job in self.running if self._ran(job, now) >= job.seconds]
        self.running = [job for job in self.running if job not in late]
        stopped, begun = [], []
        while self._fresh or self._slow:
            if len(self.running) >= self._places:
                slow = [job for job in self.running if self._ran(job, now) >= TURN]
                if not self._fresh or len(slow) < 2:
                    break
                victim = min(slow, key=lambda job: self._ran(job, now))
                self.running.remove(victim)
                self._slow.append(victim)
                stopped.append(victim)
            if self._fresh:
                job = self._fresh.pop() if self._is_last_next else self._fresh.popleft()
                self._is_last_next = not self._is_last_next
            else:
                self._slow.remove(job := min(self._slow, key=lambda job: job.number))
            job.started = now
            self.running.append(job)
            begun.append(job)
        return Changes(late, stopped, begun)

    def wait(self, now: float) -> float | None:
        """Return the seconds until `change` has something to do if no job is added or ends; None if no job runs."""
        ends = [job.seconds - self._ran(job, now) for job in self.running]
        if self._fresh:
            ends += [TURN - self._ran(job, now) for job in self.running if self._ran(job, now) < TURN]
        return max(0.0, min(ends)) if ends else None

    def _ran(self, job: Job, now: float) -> float:
        return 0.0 if job.started is None else now - job.started
