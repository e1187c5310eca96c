"""The protocol of `kernels/comm/_peers.py` as a model: in whatever order things happen, nobody reads a wrong value.

The kernels' loads, stores, signals and waits, one at a time, of several ranks and programs in random orders; a store is
seen at once, or as late as the signal that follows it or the end of the call. In turn, parts are left out.
"""

import random

import pytest

MAX_PROGRAMS, CAPACITY, PART = 4, 12, 2


def up(number, multiple):
    return -(-number // multiple) * multiple


class Model:
    """`size` ranks that make the same `calls`, each (shots, posted, numel, programs, programs that need the sums)."""

    def __init__(self, size, calls, rng, without=None):
        self.size, self.calls, self.rng, self.without = size, calls, rng, without
        stage = CAPACITY + MAX_PROGRAMS * size * PART
        self.stages = [[[None] * stage for _ in range(2)] for _ in range(size)]
        # A mailbox is empty where it is None: whole inputs of all ranks, or parts in one half and sums in the other.
        self.half = max(stage, size * up(CAPACITY, PART) - CAPACITY)
        self.mailboxes = [[[None] * (self.half + CAPACITY) for _ in range(2)] for _ in range(size)]
        self.gathered = [[None] * CAPACITY for _ in range(size)]
        self.signals = [{} for _ in range(size)]
        self.epochs = [[0] * MAX_PROGRAMS for _ in range(size)]

    def program(self, rank, call, b):
        shots, posted, numel, grid, takers = self.calls[call]
        late, everybody = [], [(rank + turn) % self.size for turn in range(1, self.size + 1)]

        def store(memory, at, value):
            assert 0 <= at < len(memory)
            late.append((memory, at, value))
            if self.rng.random() < 0.5:
                memory[at] = late.pop()[2]

        def arrive():
            for memory, at, value in self.rng.sample(late, len(late)):
                memory[at] = value
                yield
            late.clear()

        def load(memory, at, expected):
            assert memory[at] == expected, f"read {memory[at]}, expected {expected}"

        def take(memory, at, expected):
            while memory[at] is None:
                if late:
                    yield from arrive()
                yield "waits"
            load(memory, at, expected)
            if self.without != "emptying":
                store(memory, at, None)
            yield

        def wait_for_peers(wait):
            yield from arrive()
            for other in self.rng.sample(everybody, self.size):
                self.signals[other][wait, b, rank] = epoch
                yield
            for other in everybody:
                while self.signals[rank].get((wait, b, other), 0) < epoch:
                    yield "waits"

        def share_of(programs):
            share = up(-(-numel // programs), PART)
            return min(b * share, numel), min((b + 1) * share, numel)

        epoch = self.epochs[rank][b] + 1
        begin, end = share_of(grid)
        stages = [s[0 if self.without == "second stage" else epoch % 2] for s in self.stages]
        mail = [m[0 if self.without == "second mailbox" else epoch % 2] for m in self.mailboxes]
        part, base = up(-(-(end - begin) // self.size), PART), begin + b * self.size * PART
        parts = mail if posted else stages
        if shots == 1:
            for at in range(begin, end):
                if posted:
                    for other in everybody:
                        yield store(mail[other], rank * up(numel, PART) + at, (call, rank, at))
                else:
                    yield store(stages[rank], at, (call, rank, at))
        else:
            for other in everybody:
                for at in range(begin + other * part, min(begin + (other + 1) * part, end)):
                    yield store(parts[other], base + rank * part + at - begin - other * part, (call, rank, at))
        if not posted:
            yield from wait_for_peers(0)
        if shots == 2:
            for at in range(begin + rank * part, min(begin + (rank + 1) * part, end)):
                for other in everybody:
                    place = parts[rank], base + other * part + at - begin - rank * part, (call, other, at)
                    if posted:
                        yield from take(*place)
                    else:
                        yield load(*place)
                for other in everybody:
                    yield store(mail[other] if posted else self.gathered[other], posted * self.half + at, (call, at))
            if not posted and self.without != "second wait":
                yield from wait_for_peers(1)
        for at in range(*share_of(takers)):
            if shots == 2 and posted:
                yield from take(mail[rank], self.half + at, (call, at))
            elif shots == 2:
                yield load(self.gathered[rank], at, (call, at))
            for other in everybody if shots == 1 else ():
                if posted:
                    yield from take(mail[rank], other * up(numel, PART) + at, (call, other, at))
                else:
                    yield load(stages[other], at, (call, other, at))
        yield from arrive()
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
                running[rank] += [self.program(rank, started[rank], b) for b in range(self.calls[started[rank]][3])]
                started[rank] += 1
            if running[rank]:
                at = self.rng.randrange(len(running[rank]))
                said = next(running[rank][at], "ended")
                if said == "ended":
                    del running[rank][at]
                idle = idle + 1 if said == "waits" else 0
                assert idle < 2_000, "all wait"


def random_call(rng):
    shots, posted, grid = rng.choice([1, 2]), rng.random() < 0.5, rng.randint(1, MAX_PROGRAMS)
    # Few rows that are posted: more programs post than need the sums.
    return shots, posted, rng.randint(1, CAPACITY), grid, rng.randint(1, grid) if posted else grid


def run_all(without=None):
    for seed in range(60):
        rng = random.Random(seed)
        calls = [random_call(rng) for _ in range(8)]
        Model(rng.choice([2, 3]), calls, rng, without).run()


def test_nobody_reads_a_wrong_value():
    run_all()


@pytest.mark.parametrize("without", [
    "second stage", "second mailbox", "emptying", "second wait", "others' counters", "end of the call before",
])
def test_no_part_of_the_protocol_is_idle(without):
    with pytest.raises(AssertionError, match=r"read|all wait"):
        run_all(without)
