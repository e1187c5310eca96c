"""One rank of test_all_reduce.py's gpu test: ``python all_reduce_ranks.py SIZE STORE_FILE RANK``."""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist

from hf_paged.kernels.comm.all_reduce import (
    ALGORITHMS,
    Algorithm,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_reference,
)
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.parallel.group import join
from hf_paged.parallel.peers import open_peers

EPS = 1e-6
CAPACITY = 24 << 20
WIDTHS = {torch.bfloat16: (1024, 4096, 5120, 8192), torch.float16: (1024, 5120), torch.float32: (1024, 8192)}
ROWS = (1, 2, 3, 7, 33, 64, 127, 130, 256, 257, 512)


class Rank:
    def __init__(self, size: int, store: str, rank: int) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.group = join(rank, size, self.device, store=dist.FileStore(store, size))
        self.buffers = open_peers(self.group.hosts, self.device, CAPACITY)
        self.peers = self.buffers.peers
        self.generator = torch.Generator(self.device).manual_seed(1000 + rank)
        self.shared = torch.Generator(self.device).manual_seed(7)

    def randn(self, shape, dtype, shared=False, scale=1.0):
        """Random numbers of this rank, or the same on all."""
        generator = self.shared if shared else self.generator
        tensor = (torch.randn(shape, generator=generator, device=self.device) * scale).to(dtype)
        if shared:
            dist.broadcast(tensor, src=0, group=self.group._devices)
        return tensor

    def expected(self, x):
        return all_reduce_reference(list(self.group.all_gather(x)))


def poisoned(*shapes, dtype, device):
    """The next allocations of these shapes find NaN."""
    for tensor in [torch.full(shape, torch.nan, dtype=dtype, device=device) for shape in shapes]:
        del tensor


def check(actual, expected, what):
    same = torch.equal(actual, expected)
    if not same:
        wrong = (actual != expected).nonzero()
        raise AssertionError(f"{what}: {len(wrong)} of {actual.numel()} differ, first at {wrong[0].tolist()}")


def exact(rank: Rank) -> None:
    """Every shape, dtype and way, alone and fused; the same bits on all ranks."""
    for dtype, widths in WIDTHS.items():
        for width in widths:
            weight = 1 + rank.randn((width,), dtype, shared=True, scale=0.3)
            for rows in ROWS:
                x = rank.randn((rows, width), dtype, scale=3.0 ** (rank.rank % 3))
                wide = rank.randn((rows, width + 64), dtype, shared=True)
                expected = rank.expected(x)
                for how in (how for how in ALGORITHMS if rank.peers.takes(x.nbytes, *how)):
                    what = f"{dtype} {rows} x {width}, {how}"
                    poisoned(x.shape, dtype=dtype, device=rank.device)
                    check(all_reduce(x, rank.peers, how), expected, what)
                    for residual in (wide[:, 32:-32], None) if width == 1024 else (wide[:, 32:-32],):
                        poisoned(x.shape, x.shape, dtype=dtype, device=rank.device)
                        normed, summed = all_reduce_add_rms_norm(x, residual, weight, EPS, rank.peers, how)
                        normed_apart, summed_apart = add_rms_norm(expected, residual, weight, EPS)
                        check(summed, summed_apart, f"sum, {what}")
                        check(normed, normed_apart, f"norm, {what}")
                        everyones = rank.group.all_gather(normed)
                        assert all(torch.equal(everyones[0], other) for other in everyones[1:]), what
    for numel in (1, 7, 8, 4097, 524289, 1000003):
        x = rank.randn((numel,), torch.bfloat16)
        expected = rank.expected(x)
        for how in ALGORITHMS:
            poisoned(x.shape, dtype=x.dtype, device=rank.device)
            check(all_reduce(x, rank.peers, how), expected, f"{numel} values, {how}")


def edges(rank: Rank) -> None:
    """NaN of any bits, infinities and overflow pass through."""
    x = rank.randn((4, 1024), torch.bfloat16)
    x[0, rank.rank], x[1, 5] = torch.nan, (torch.inf if rank.rank else -torch.inf)
    x[2, 9] = torch.finfo(torch.bfloat16).max
    x[3] = -0.0
    x.view(torch.int16)[0, 100:200] = -1  # as an empty place of a mailbox
    expected = rank.expected(x)
    assert expected.isnan().any() and expected.isinf().any()
    for how in ALGORITHMS:
        result = all_reduce(x, rank.peers, how)
        check(result.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0), "edges")
        check(result.signbit() & ~result.isnan(), expected.signbit() & ~expected.isnan(), "signs")


class Cases:
    """Inputs of some sizes with what has to come out; several of each size, so that stale data show."""

    def __init__(self, rank: Rank, shapes) -> None:
        self.rank, self.cases = rank, []
        for rows, width in shapes:
            weight = 1 + rank.randn((width,), torch.bfloat16, shared=True, scale=0.3)
            for _ in range(3):
                x = rank.randn((rows, width), torch.bfloat16)
                residual = rank.randn((rows, width), torch.bfloat16, shared=True)
                expected = rank.expected(x)
                self.cases.append((x, residual, weight, expected, add_rms_norm(expected, residual, weight, EPS)[0]))
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def call(self, number, kind):
        """`kind`: a number below `KINDS`, of a way, alone or fused."""
        x, residual, weight, expected, normed = self.cases[number]
        how = ALGORITHMS[kind // 2] if self.rank.peers.takes(x.nbytes, *ALGORITHMS[kind // 2]) else Algorithm(2, False)
        if kind % 2:
            actual, _ = all_reduce_add_rms_norm(x, residual, weight, EPS, self.rank.peers, how)
        else:
            actual = all_reduce(x, self.rank.peers, how)
        self.wrong += (actual != (normed if kind % 2 else expected)).sum()


KINDS = 2 * len(ALGORITHMS)
SHAPES = [(1, 5120), (3, 4096), (64, 5120), (130, 1024), (256, 5120)]


def back_to_back(rank: Rank, calls: int = 1000) -> None:
    """Calls of changing sizes and kinds without a host in between, with ranks late at random."""
    cases = Cases(rank, SHAPES)
    together, alone = random.Random(1), random.Random(100 + rank.rank)
    torch.cuda.synchronize()
    for _ in range(calls):
        if alone.random() < 0.1:
            torch.cuda._sleep(alone.choice([2_000, 50_000, 1_000_000]))
        cases.call(together.randrange(len(cases.cases)), together.randrange(KINDS))
    check(cases.wrong, torch.zeros_like(cases.wrong), "back to back")


def same_input_rewritten(rank: Rank) -> None:
    """One kernel after the other with nothing but all-reduces between: programs start before their predecessors end."""
    for rows, width in SHAPES:
        x = rank.randn((rows, width), torch.bfloat16, scale=0.1)
        by_two = []
        for call in range(40):
            x_then = x
            how = ALGORITHMS[call % len(ALGORITHMS)]
            for _ in range(2):
                x = all_reduce(x, rank.peers, how if rank.peers.takes(x.nbytes, *how) else Algorithm(2, False))
            by_two.append((x_then, x))
            x = x * (1.0 / rank.size**2)
        for before, after in by_two:
            check(after, rank.expected(rank.expected(before)), f"chain of {rows} x {width}")


def graphs(rank: Rank, replays: int = 300) -> None:
    """An odd number of calls in a graph, replayed with other inputs and late ranks inside and between."""
    cases = Cases(rank, SHAPES)
    together, alone = random.Random(2), random.Random(200 + rank.rank)
    order = [(together.randrange(len(cases.cases)), together.randrange(KINDS)) for _ in range(21)]
    for number in range(len(cases.cases)):
        for kind in range(KINDS):
            cases.call(number, kind)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for number, kind in order:
            if alone.random() < 0.2:
                torch.cuda._sleep(alone.choice([1_000, 20_000]))
            cases.call(number, kind)
    for _ in range(replays):
        if alone.random() < 0.2:
            torch.cuda._sleep(alone.choice([2_000, 500_000]))
        graph.replay()
        cases.call(together.randrange(len(cases.cases)), together.randrange(KINDS))
    check(cases.wrong, torch.zeros_like(cases.wrong), "graphs")


def giving_up(rank: Rank) -> None:
    """A peer that does not come: `abort` ends the wait. Last, since the epochs differ from here on."""
    if rank.rank < rank.size - 1:
        x = rank.randn((64, 5120), torch.bfloat16)
        done = torch.cuda.Event()
        for how in (Algorithm(1, True), *ALGORITHMS):
            all_reduce(x, rank.peers, how)
        done.record()
        time.sleep(0.5)
        assert not done.query(), "nobody waited"
        rank.buffers.abort()
        until = time.monotonic() + 10
        while not done.query():
            assert time.monotonic() < until, "still waiting 10 s after the abort"
    assert bool(rank.buffers.peers.abort) == (rank.rank < rank.size - 1)


def main(size: int, store: str, number: int) -> None:
    rank = Rank(size, store, number)
    for part in (exact, edges, back_to_back, same_input_rewritten, graphs, giving_up):
        began = time.monotonic()
        part(rank)
        torch.cuda.synchronize()
        dist.barrier(group=rank.group._hosts)
        print(f"{part.__name__}: passed in {time.monotonic() - began:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
