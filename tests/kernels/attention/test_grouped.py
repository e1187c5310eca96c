"""The kernels that read shared prefixes once, in the interpreter and compiled, against attention in float64."""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from paged_cases import expected, make_case, random_groups, run_poisoned, worst_error

from hf_paged.attention import choose_groups as choosing
from hf_paged.attention import plan_decode, plan_prompts
from hf_paged.attention.choose_groups import Kernel, choose_groups
from hf_paged.attention.plan_prompts import PromptKernel, Prompts, RowPrograms
from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention import grouped
from hf_paged.kernels.attention.grouped import (
    _grouped_kernel,
    grouped_config,
    paged_attention_grouped,
    paged_attention_grouped_prefill,
)
from hf_paged.kernels.attention.types import AttentionSpec, GroupedConfig, GroupedWork, PromptWork
from hf_paged.scheduler.prefix_tree import PrefixGroups

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CONFIG = GroupedConfig(16, 16, 2, 16, 2, 4, 3)


@pytest.fixture(autouse=True)
def every_group_pays(monkeypatch):
    monkeypatch.setattr(choosing, "PIECE_COST", 0)
    monkeypatch.setattr(plan_decode, "MIN_SAVED_SHARE", 0.0)
    monkeypatch.setattr(grouped, "_JOINED_PIECES", 4)
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MIN_SPLIT", 16)):
        monkeypatch.setattr(plan_prompts, name, value)
    monkeypatch.setattr("hf_paged.kernels.attention.grouped.MIN_PROMPT_SPLIT", 16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory for parts starts as NaN: a part that nobody wrote shows, whatever its weight."""
    empty = torch.empty

    def poisoned(*size, **options):
        memory = empty(*size, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


def planned_rows(case, groups, config, cta_slots=9):
    """The case with the plan of a grouped step."""
    lengths = np.array([length for _, length in case.rows])
    device, heads = case.q.device, case.q.shape[1] // case.k_cache.shape[2]
    kernel = Kernel(config, config.block_m // heads, cta_slots, positions_worth_it=1)
    choice = choose_groups(groups, len(lengths), kernel)
    assert choice is not None
    plan = plan_decode.plan_groups(lengths, case.meta.slots.cpu().numpy(), choice)
    items, table = (torch.from_numpy(array).to(device) for array in (plan.items, plan.rows))
    work = GroupedWork(items, table, plan.num_parts, config)
    return case._replace(meta=case.meta._replace(work=work))


def planned_prompts(case, groups, config, cta_slots=9, *, spare=None):
    """The case with the plan of prompts that share; `spare`: tokens and rows that a captured step has more of."""
    num_new, lengths = np.array(case.rows).T
    device, heads = case.q.device, case.q.shape[1] // case.k_cache.shape[2]
    rows = RowPrograms(1, 1, 100.0, 1.0)
    kernel = PromptKernel(Kernel(config, config.block_m // heads, cta_slots, 1), rows, rows)
    prompts = Prompts(lengths - num_new, num_new, case.meta.slots.cpu().numpy(), *case.meta[5:7])
    plan = plan_prompts.plan_prompts(groups, prompts, kernel)
    assert plan is not None
    if spare is not None:
        plan = plan_prompts.padded(plan, int(num_new.sum()) + spare[0], len(lengths) + spare[1])
    items, rows, own_begin = (torch.from_numpy(array).to(device) for array in plan[:3])
    work = PromptWork(GroupedWork(items, rows, plan.num_parts, config), own_begin)
    return case._replace(meta=case.meta._replace(work=work))


def drawn_rows(seed, count, longest, block_size):
    """Rows of one new token, padding among them, and their groups."""
    r = random.Random(seed)
    while True:
        lengths = [r.choice([0, r.randint(1, 30), *[r.randint(block_size + 1, longest)] * 6]) for _ in range(count)]
        groups = random_groups(r, lengths, block_size)
        if groups is not None:
            return r, [(1, length) for length in lengths], groups


def drawn_prompts(seed, count, longest, block_size):
    """Rows of several new tokens behind what they share, some that share nothing, and the groups."""
    r, longest_new = random.Random(seed), 20 if longest < 1000 else 90
    while True:
        starts = [r.choice([0, r.randint(1, 30), *[r.randint(block_size, longest)] * 6]) for _ in range(count)]
        # A group ends ahead of every row's first new token, which may follow at once.
        groups = random_groups(r, [start + 1 for start in starts], block_size)
        if groups is not None:
            new = [r.choice([1, 2, r.randint(1, longest_new)]) for _ in starts]
            return r, [(n, start + n) for n, start in zip(new, starts, strict=True)], groups


class Grouped(NamedTuple):
    """A kernel, and how its random cases are made: by ``planned(case, groups, config, cta_slots)`` and ``drawn``."""

    run: Callable[..., torch.Tensor]
    planned: Callable
    drawn: Callable
    num_rows: int  # and the longest of a case in the interpreter, and the most rows on a GPU
    longest: int
    most_rows: int


DECODE = Grouped(paged_attention_grouped, planned_rows, drawn_rows, 6, 200, 300)
PROMPTS = Grouped(paged_attention_grouped_prefill, planned_prompts, drawn_prompts, 5, 120, 60)
of_both = pytest.mark.parametrize("kernel", [DECODE, PROMPTS], ids=["decode", "prompts"])


def checked(case, kernel=DECODE):
    """What the kernel computes, twice over the same plan."""
    outs = [run_poisoned(kernel.run, case) for _ in range(2)]
    assert torch.equal(*outs)
    assert worst_error(outs[0], expected(case)) < TOLERANCE[case.q.dtype]
    return outs[0]


@of_both
@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(16))
def test_random_trees(kernel, seed):
    block_size = [16, 32, 64, 128][seed % 4]
    r, rows, groups = kernel.drawn(seed, kernel.num_rows, max(kernel.longest, 2 * block_size), block_size)
    kv_heads = r.choice([1, 2])
    head_dim = [32, 64, 80, 128][seed // 4]
    case = make_case(
        rows, seed=seed, groups=groups, heads=kv_heads * r.choice([1, 2, 3, 8]), kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, window=[None, 1, 33, 100][(seed + seed // 4) % 4],
        softcap=None if seed % 3 == 1 else r.choice([None, 3.0]), sinks=seed % 3 == 1,
        dtype=r.choice([torch.float32, torch.float16]),
    )
    config = GroupedConfig(r.choice([16, 32]), r.choice([16, 32]), 2, 16, 2, 4, 3)
    checked(kernel.planned(case, groups, config, cta_slots=r.choice([1, 9, 40])), kernel)


@of_both
@pytest.mark.interpreted
@pytest.mark.parametrize(("seed", "chunk"), [(1, None), (2, 20), (3, 64), (5, 100)])
def test_values_of_another_size_than_keys_and_chunks(kernel, seed, chunk):
    _, rows, groups = kernel.drawn(seed, kernel.num_rows, kernel.longest, 16)
    case = make_case(rows, seed=seed, groups=groups, heads=4, kv_heads=2, head_dim=[24, 96][seed % 2],
                     value_dim=[40, 64][seed % 2], chunk=chunk, sinks=seed == 3)
    checked(kernel.planned(case, groups, CONFIG), kernel)


def shared(rows, length):
    """All rows share that many positions."""
    numbers = np.array([[0], [rows], [0], [length]], np.int32)
    return PrefixGroups(np.arange(rows, dtype=np.int32), *numbers)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 40, 170])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_group_of_several_tiles_and_splits(monkeypatch, window, sinks):
    """The first rows see less of the prefix than the last ones, or nothing of it."""
    monkeypatch.setattr(plan_decode, "MIN_GROUP_SPLIT", 16)
    rows = [(1, 150 + 20 * i) for i in range(6)]
    groups = shared(6, 144)
    case = make_case(rows, seed=1, groups=groups, heads=4, kv_heads=1, window=window, sinks=sinks)
    case = planned_rows(case, groups, CONFIG, cta_slots=60)
    items = case.meta.work.items
    assert items[:, 0].max() == 3, "tiles of few rows, so that there are several"
    assert items[items[:, 0] > 0, 6].max() > 1
    checked(case)


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows have more pieces than are joined at a time, all as short as a tile."""
    for name in ("MIN_SPLIT", "MIN_GROUP_SPLIT", "MIN_LONG_SPLIT"):
        monkeypatch.setattr(plan_decode, name, 16)
    monkeypatch.setattr(plan_decode, "TILE_COST", 1.0)
    monkeypatch.setattr(plan_decode, "MIN_SAVED_SHARE", 0.0)


def check_short_pieces(case, groups):
    case = planned_rows(case, groups, CONFIG, cta_slots=60)
    assert case.meta.work.rows[:, 1].max() > 8
    checked(case)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 50])
def test_short_pieces(short_pieces, window):
    groups = shared(3, 112)
    check_short_pieces(make_case([(1, 120), (1, 200), (1, 113), (1, 64)], seed=3, groups=groups, window=window), groups)


@pytest.mark.interpreted
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_of_all_pieces_that_are_joined_first(short_pieces, sinks):
    groups = shared(2, 112)
    check_short_pieces(make_case([(1, 190), (1, 200)], seed=2, groups=groups, window=30, sinks=sinks), groups)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 40, 170])
@pytest.mark.parametrize("sinks", [False, True])
def test_prompts_of_several_tiles_and_splits_under_windows_and_sinks(window, sinks):
    """The first rows see less of the prefix than the last ones, or nothing of it; tiles hold tokens of several rows."""
    rows = [(3 + i, 150 + 20 * i) for i in range(6)]
    groups = shared(6, 144)
    case = make_case(rows, seed=1, groups=groups, heads=4, kv_heads=1, window=window, sinks=sinks)
    case = planned_prompts(case, groups, CONFIG, cta_slots=60)
    items = case.meta.work.shared.items
    assert len(items) > items[:, 6].max() > 1
    checked(case, PROMPTS)


@pytest.mark.interpreted
def test_a_plan_padded_for_a_graph_gives_the_same_bits():
    """Its arrays have room for more tokens, rows and parts."""
    _, rows, groups = drawn_prompts(7, 5, 120, 16)
    case = make_case(rows, seed=7, groups=groups)
    exact, wide = (planned_prompts(case, groups, CONFIG, spare=spare) for spare in (None, (5, 3)))
    assert len(wide.meta.work.shared.items) > len(exact.meta.work.shared.items)
    assert torch.equal(checked(exact, PROMPTS), checked(wide, PROMPTS))


@of_both
@pytest.mark.interpreted
def test_a_scale_that_turns_scores_around(kernel):
    groups, rows = shared(2, 64), [(1, 70), (1, 90)] if kernel is DECODE else [(6, 70), (26, 90)]
    case = make_case(rows, seed=3, groups=groups)
    for scale in (-0.3, 0.0):
        checked(kernel.planned(case._replace(options=case.options.__class__(scale)), groups, CONFIG), kernel)


@of_both
@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
def test_nothing_is_written_outside(kernel):
    groups, new = shared(5, 48), 1 if kernel is DECODE else 2
    case = make_case([(new, 50 + i) for i in range(5)], seed=4, groups=groups, head_dim=80)
    case = kernel.planned(case, groups, CONFIG)
    assert worst_error(kernel.run(*case[:5]), expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
def test_a_backend_takes_the_kernel_that_the_plan_is_for(monkeypatch):
    groups = shared(2, 64)
    case = planned_rows(make_case([(1, 70), (1, 90)], seed=5, groups=groups), groups, CONFIG)
    for name in ("triton", "flash_attn"):
        monkeypatch.setattr("hf_paged.attention.triton_backend.paged_attention_decode", None)
        assert torch.equal(BACKENDS[name].run(*case[:5]), paged_attention_grouped(*case[:5]))


def test_the_reference_reads_every_row_for_itself():
    groups = shared(2, 64)
    case = planned_rows(make_case([(1, 70), (1, 90)], seed=5, groups=groups), groups, CONFIG)
    assert BACKENDS["torch"].choose_groups(groups, 2, AttentionSpec(4, 2, 32, torch.float32, case.q.device, 16)) is None
    assert worst_error(BACKENDS["torch"].run(*case[:5]), expected(case)) < TOLERANCE[torch.float32]


GPU_SHAPES = [(d, torch.bfloat16) for d in (32, 64, 80, 128, 256)] + [(128, torch.float16), (64, torch.float32),
                                                                       (256, torch.float32)]


@of_both
@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), GPU_SHAPES, ids=str)
def test_gpu_random_trees(kernel, head_dim, dtype):
    tolerance = {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype])
    r = random.Random(f"{head_dim}{dtype}")
    kv_heads, heads_each = r.choice([1, 2, 8]), r.choice([1, 2, 3, 4, 8])
    for seed, most_rows in enumerate((8, kernel.most_rows)):
        block_size, window = (16, None) if seed == 0 else (r.choice([32, 256]), 700)
        _, rows, groups = kernel.drawn(seed, most_rows, 1500, block_size)
        case = make_case(
            rows, seed=seed, groups=groups, heads=kv_heads * heads_each, kv_heads=kv_heads, head_dim=head_dim,
            block_size=block_size, window=window, softcap=30.0 if seed else None, sinks=not seed, dtype=dtype,
            device="cuda",
        )
        right = expected(case)
        config = grouped_config(case.q.shape[2] if head_dim != 80 else 128, dtype.itemsize, heads_each, 227 << 10)
        for cta_slots in (9, 66):
            work = kernel.planned(case, groups, config, cta_slots=cta_slots)
            outs = [run_poisoned(kernel.run, work) for _ in range(5)]
            assert worst_error(outs[0], right) < tolerance
            assert all(torch.equal(outs[0], out) for out in outs[1:]), "the result depends on the plan alone"


@pytest.mark.gpu
def test_gpu_large_groups_in_any_order_of_programs():
    """Own parts far shorter, and far longer, than the group's splits; another stream keeps multiprocessors busy."""
    for own, prefix in ((8, 16384), (1500, 512)):
        rows, groups = [(1, prefix + 1 + i % own) for i in range(96)], shared(96, prefix)
        case = make_case(rows, seed=own, groups=groups, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                         device="cuda")
        work = planned_rows(case, groups, grouped_config(128, 2, 2, 227 << 10), cta_slots=49)
        side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        outs = []
        for i in range(20):
            with torch.cuda.stream(side):
                for _ in range(i % 4):
                    noise @ noise
            outs.append(run_poisoned(paged_attention_grouped, work))
        torch.cuda.synchronize()
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        plain = BACKENDS["triton"].run(*case[:5])
        assert worst_error(outs[0], plain.double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_gpu_a_graph_serves_every_plan_of_its_size_and_compiles_nothing():
    def compiled():
        return sum(len(c[0]) for c in _grouped_kernel.device_caches.values())

    cases = []
    for seed in range(3):
        _, rows, groups = drawn_rows(seed, 24, 900, 16)
        case = make_case(rows, seed=seed, groups=groups, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                         device="cuda")
        cases.append(planned_rows(case, groups, grouped_config(128, 2, 2, 227 << 10), cta_slots=49))
    widest = max(case.meta.block_table.shape[1] for case in cases)
    most_blocks = max(len(case.k_cache) for case in cases)
    q, table, lens, slots = (torch.empty_like(x) for x in (
        cases[0].q, torch.empty(len(cases[0].meta.block_table), widest, dtype=torch.int32, device="cuda"),
        cases[0].meta.seq_lens, cases[0].meta.slots))
    k, v = (torch.full((most_blocks, 16, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    work = GroupedWork(*(x.clone() if isinstance(x, torch.Tensor) else x for x in cases[0].meta.work))
    meta = cases[0].meta._replace(block_table=table, seq_lens=lens, slots=slots, work=work)
    out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
    graph, before = None, 0
    for case in cases:
        q.copy_(case.q)
        theirs, width, blocks = case.meta, case.meta.block_table.shape[1], len(case.k_cache)
        for mine, new in ((table[:, :width], theirs.block_table), (lens, theirs.seq_lens), (slots, theirs.slots),
                          (k[:blocks], case.k_cache), (v[:blocks], case.v_cache), (work.items, theirs.work.items),
                          (work.rows, theirs.work.rows)):
            mine.copy_(new)
        if graph is None:
            paged_attention_grouped(q, k, v, meta, case.options, out=out)
            torch.cuda.synchronize()
            graph, before = torch.cuda.CUDAGraph(), compiled()
            with torch.cuda.graph(graph):
                paged_attention_grouped(q, k, v, meta, case.options, out=out)
        out.fill_(float("nan"))
        graph.replay()
        assert worst_error(out, expected(case)) < TOLERANCE[torch.bfloat16]
    assert compiled() == before
