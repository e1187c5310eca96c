"""The protocol of `kernels/_peers.py` as a model: in whatever order things happen, nobody reads a wrong value.

The kernels' loads, stores, signals and waits, one at a time, of several ranks and programs in random orders; a store to
a peer is seen at once or as late as the signal that follows it. In turn, parts are left out.
"""

import random

import pytest

MAX_PROGRAMS, CAPACITY, PART = 4, 12, 2


def up(number, multiple):
    return -(-number // multiple) * multiple


class Model:
    """`size` ranks that make the same `calls`, each (shots, numel, programs)."""

    def __init__(self, size, calls, rng, without=None):
        self.size, self.calls, self.rng, self.without = size, calls, rng, without
        stage = max(1, size - 1) * up(CAPACITY, PART) + MAX_PROGRAMS * size * PART
        self.stages = [[[None] * stage for _ in range(2)] for _ in range(size)]
        self.gathered = [[None] * CAPACITY for _ in range(size)]
        self.signals = [{} for _ in range(size)]
        self.epochs = [[0] * MAX_PROGRAMS for _ in range(size)]

    def program(self, rank, call, b):
        shots, numel, grid = self.calls[call]
        late, everybody = [], [(rank + turn) % self.size for turn in range(1, self.size + 1)]

        def store(memory, at, value):
            assert 0 <= at < len(memory)
            late.append((memory, at, value))
            if self.rng.random() < 0.5:
                memory[at] = late.pop()[2]

        def load(memory, at, expected):
            assert memory[at] == expected, f"read {memory[at]}, expected {expected}"

        def wait_for_peers(wait):
            for memory, at, value in self.rng.sample(late, len(late)):
                memory[at] = value
                yield
            late.clear()
            for other in self.rng.sample(everybody, self.size):
                self.signals[other][wait, b, rank] = epoch
                yield
            for other in everybody:
                while self.signals[rank].get((wait, b, other), 0) < epoch:
                    yield "waits"

        epoch = self.epochs[rank][b] + 1
        share = up(-(-numel // grid), PART)
        begin, end = b * share, min((b + 1) * share, numel)
        stages = [s[0 if self.without == "second stage" else epoch % 2] for s in self.stages]
        if shots == 1:
            for other in everybody[:-1]:
                slot = (rank - (rank > other)) * up(numel, PART)
                for at in range(begin, end):
                    yield store(stages[other], slot + at, (call, rank, at))
            yield from wait_for_peers(0)
            for other in everybody[:-1]:
                slot = (other - (other > rank)) * up(numel, PART)
                for at in range(begin, end):
                    yield load(stages[rank], slot + at, (call, other, at))
        else:
            part, base = up(-(-(end - begin) // self.size), PART), begin + b * self.size * PART
            for other in everybody:
                for at in range(begin + other * part, min(begin + (other + 1) * part, end)):
                    yield store(stages[other], base + rank * part + at - begin - other * part, (call, rank, at))
            yield from wait_for_peers(0)
            for at in range(begin + rank * part, min(begin + (rank + 1) * part, end)):
                for other in everybody:
                    yield load(stages[rank], base + other * part + at - begin - rank * part, (call, other, at))
                for other in everybody:
                    yield store(self.gathered[other], at, (call, at))
            if self.without != "second wait":
                yield from wait_for_peers(1)
            for at in range(begin, end):
                yield load(self.gathered[rank], at, (call, at))
        for counter in range(b, b + 1 if self.without == "others' counters" else MAX_PROGRAMS, grid):
            self.epochs[rank][counter] = epoch

    def run(self):
        """All calls of all ranks, some ranks much slower than others; AssertionError where a value is wrong."""
        started, running, idle = [0] * self.size, [[] for _ in range(self.size)], 0
        speeds = self.rng.choices([1, 4, 20], k=self.size)
        while any(running) or min(started) < len(self.calls):
            (rank,) = self.rng.choices(range(self.size), speeds)
            early = self.without == "end of the call before" and len(running[rank]) == 1
            if (early or not running[rank]) and started[rank] < len(self.calls):
                running[rank] += [self.program(rank, started[rank], b) for b in range(self.calls[started[rank]][2])]
                started[rank] += 1
            if running[rank]:
                at = self.rng.randrange(len(running[rank]))
                said = next(running[rank][at], "ended")
                if said == "ended":
                    del running[rank][at]
                idle = idle + 1 if said == "waits" else 0
                assert idle < 2_000, "all wait"


def run_all(without=None):
    for seed in range(50):
        rng = random.Random(seed)
        calls = [(rng.choice([1, 2]), rng.randint(1, CAPACITY), rng.randint(1, MAX_PROGRAMS)) for _ in range(8)]
        Model(rng.choice([2, 3]), calls, rng, without).run()


def test_nobody_reads_a_wrong_value():
    run_all()


@pytest.mark.parametrize("without", ["second stage", "second wait", "others' counters", "end of the call before"])
def test_no_part_of_the_protocol_is_idle(without):
    with pytest.raises(AssertionError, match=r"read|all wait"):
        run_all(without)
