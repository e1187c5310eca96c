"""Which forms are compiled at a time, where more are asked for than there are processes: short ones do not wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_paged.options.structured import Structured

TURN = 0.25  # seconds that a compilation has before others may take its place


@dataclass(eq=False)
class Job:
    """A form to be compiled.

    Attributes:
        number: by which it is known.
        vocabulary: for which one, by its number.
        seconds: that it may take.
        started: when its process began, by `time.monotonic`; None: it waits.
        process: what compiles it.
    """

    number: int
    vocabulary: int
    structured: Structured
    seconds: float
    started: float | None = None
    process: Any = None


class Changes(NamedTuple):
    """What is to be done now: compilations that end since they took too long, that give way, and that begin."""

    late: list[Job]
    stopped: list[Job]
    begun: list[Job]


class FormQueue:
    """Jobs in the order in which they get a place.

    A job that has not had its turn goes first, and takes the place of one that has had more than that, which begins
    again later. One of those always goes on, so that each comes to an end. Of several that have not had their turn, the
    last that came and the first are next by turns: a short job does not wait for all the slow ones that came before,
    and those that came first do not wait for ever.

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
        """The job is done, or nobody waits for it."""
        for jobs in (self._fresh, self._slow, self.running):
            if job in jobs:
                jobs.remove(job)

    def change(self, now: float) -> Changes:
        """What happens at this time, which is counted as done; what begins is for the caller to start."""
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
        """Seconds until `change` would do something, if no job comes or ends; None: nothing runs."""
        ends = [job.seconds - self._ran(job, now) for job in self.running]
        if self._fresh:
            ends += [TURN - self._ran(job, now) for job in self.running if self._ran(job, now) < TURN]
        return max(0.0, min(ends)) if ends else None

    def _ran(self, job: Job, now: float) -> float:
        return 0.0 if job.started is None else now - job.started
