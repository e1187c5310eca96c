"""The kernels that read what prompts share once, in the interpreter and compiled, against attention in float64."""

import random

import numpy as np
import pytest
import torch
from paged_cases import expected, make_case, random_groups, run_poisoned, worst_error

from hf_paged.attention import plan_prompts as planning
from hf_paged.attention.choose_groups import Kernel
from hf_paged.attention.plan_prompts import PromptKernel, Prompts, RowPrograms, padded, plan_prompts
from hf_paged.kernels.attention.grouped import grouped_config, paged_attention_grouped_prefill
from hf_paged.kernels.attention.types import GroupedConfig, GroupedWork, PromptWork
from hf_paged.scheduler.prefix_tree import PrefixGroups

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CONFIG = GroupedConfig(16, 16, 2, 16, 2, 4, 3)


@pytest.fixture(autouse=True)
def every_group_pays(monkeypatch):
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MIN_SPLIT", 16)):
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr("hf_paged.kernels.attention.grouped.MIN_PROMPT_SPLIT", 16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory for parts starts as NaN: a part that nobody wrote shows, whatever its weight."""
    empty = torch.empty

    def poisoned(*size, **options):
        memory = empty(*size, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


def planned(case, groups, config, cta_slots=9, *, spare=None):
    """The case with the plan of prompts that share; `spare`: tokens and rows that a captured step has more of."""
    num_new, lengths = np.array(case.rows).T
    device, heads = case.q.device, case.q.shape[1] // case.k_cache.shape[2]
    rows = RowPrograms(1, 1, 100.0, 1.0)
    kernel = PromptKernel(Kernel(config, config.block_m // heads, cta_slots, 1), rows, rows)
    prompts = Prompts(lengths - num_new, num_new, case.meta.slots.cpu().numpy(), *case.meta[5:7])
    plan = plan_prompts(groups, prompts, kernel)
    assert plan is not None
    if spare is not None:
        plan = padded(plan, int(num_new.sum()) + spare[0], len(lengths) + spare[1])
    items, rows, own_begin = (torch.from_numpy(array).to(device) for array in plan[:3])
    work = PromptWork(GroupedWork(items, rows, plan.num_parts, config), own_begin)
    return case._replace(meta=case.meta._replace(work=work))


def drawn(seed, count, longest, longest_new, block_size):
    """Rows of several new tokens behind what they share, some that share nothing, and the groups."""
    r = random.Random(seed)
    while True:
        starts = [r.choice([0, r.randint(1, 30), *[r.randint(block_size, longest)] * 6]) for _ in range(count)]
        # A group ends ahead of every row's first new token, which may follow at once.
        groups = random_groups(r, [start + 1 for start in starts], block_size)
        if groups is not None:
            new = [r.choice([1, 2, r.randint(1, longest_new)]) for _ in starts]
            return r, [(n, start + n) for n, start in zip(new, starts, strict=True)], groups


def checked(case):
    """What the kernels compute, twice over the same plan."""
    outs = [run_poisoned(paged_attention_grouped_prefill, case) for _ in range(2)]
    assert torch.equal(*outs)
    assert worst_error(outs[0], expected(case)) < TOLERANCE[case.q.dtype]
    return outs[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(16))
def test_random_trees(seed):
    block_size = [16, 32, 64, 128][seed % 4]
    r, rows, groups = drawn(seed, 5, max(120, 2 * block_size), 20, block_size)
    kv_heads = r.choice([1, 2])
    case = make_case(
        rows, seed=seed, groups=groups, heads=kv_heads * r.choice([1, 2, 3, 8]), kv_heads=kv_heads,
        head_dim=[32, 64, 80, 128][seed // 4], block_size=block_size,
        window=[None, 1, 33, 100][(seed + seed // 4) % 4], softcap=None if seed % 3 == 1 else r.choice([None, 3.0]),
        sinks=seed % 3 == 1, dtype=r.choice([torch.float32, torch.float16]),
    )
    config = GroupedConfig(r.choice([16, 32]), r.choice([16, 32]), 2, 16, 2, 4, 3)
    checked(planned(case, groups, config, cta_slots=r.choice([1, 9, 40])))


@pytest.mark.interpreted
@pytest.mark.parametrize(("seed", "chunk"), [(1, None), (2, 20), (3, 64), (5, 100)])
def test_values_of_another_size_than_keys_and_chunks(seed, chunk):
    _, rows, groups = drawn(seed, 5, 120, 20, 16)
    case = make_case(rows, seed=seed, groups=groups, heads=4, kv_heads=2, head_dim=[24, 96][seed % 2],
                     value_dim=[40, 64][seed % 2], chunk=chunk, sinks=seed == 3)
    checked(planned(case, groups, CONFIG))


def shared(rows, length):
    """All rows share that many positions."""
    numbers = np.array([[0], [rows], [0], [length]], np.int32)
    return PrefixGroups(np.arange(rows, dtype=np.int32), *numbers)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 40, 170])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_group_of_several_tiles_and_splits_under_windows_and_sinks(window, sinks):
    """The first rows see less of the prefix than the last ones, or nothing of it; tiles hold tokens of several rows."""
    rows = [(3 + i, 150 + 20 * i) for i in range(6)]
    groups = shared(6, 144)
    case = planned(make_case(rows, seed=1, groups=groups, heads=4, kv_heads=1, window=window, sinks=sinks), groups,
                   CONFIG, cta_slots=60)
    items = case.meta.work.shared.items
    assert len(items) > items[:, 6].max() > 1
    checked(case)


@pytest.mark.interpreted
def test_a_plan_padded_for_a_graph_gives_the_same_bits():
    """Its arrays have room for more tokens, rows and parts."""
    _, rows, groups = drawn(7, 5, 120, 20, 16)
    case = make_case(rows, seed=7, groups=groups)
    exact, wide = (planned(case, groups, CONFIG, spare=spare) for spare in (None, (5, 3)))
    assert len(wide.meta.work.shared.items) > len(exact.meta.work.shared.items)
    assert torch.equal(checked(exact), checked(wide))


@pytest.mark.interpreted
def test_a_negative_scale_and_none_at_all():
    groups = shared(2, 64)
    case = make_case([(6, 70), (26, 90)], seed=3, groups=groups)
    for scale in (-0.3, 0.0):
        checked(planned(case._replace(options=case.options.__class__(scale)), groups, CONFIG))


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
def test_nothing_is_written_outside():
    groups = shared(5, 48)
    case = planned(make_case([(2, 50 + i) for i in range(5)], seed=4, groups=groups, head_dim=80), groups, CONFIG)
    out = paged_attention_grouped_prefill(*case[:5])
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]


GPU_SHAPES = [(d, torch.bfloat16) for d in (32, 64, 80, 128, 256)] + [(128, torch.float16), (64, torch.float32),
                                                                       (256, torch.float32)]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), GPU_SHAPES, ids=str)
def test_gpu_random_trees(head_dim, dtype):
    tolerance = {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype])
    r = random.Random(f"{head_dim}{dtype}")
    kv_heads, heads_each = r.choice([1, 2, 8]), r.choice([1, 2, 3, 4, 8])
    for seed, most_rows in enumerate((8, 60)):
        block_size, window = (16, None) if seed == 0 else (r.choice([32, 256]), 700)
        _, rows, groups = drawn(seed, most_rows, 1500, 90, block_size)
        case = make_case(
            rows, seed=seed, groups=groups, heads=kv_heads * heads_each, kv_heads=kv_heads, head_dim=head_dim,
            block_size=block_size, window=window, softcap=30.0 if seed else None, sinks=not seed, dtype=dtype,
            device="cuda",
        )
        right = expected(case)
        config = grouped_config(head_dim if head_dim != 80 else 128, dtype.itemsize, heads_each, 227 << 10)
        for cta_slots in (9, 66):
            work = planned(case, groups, config, cta_slots=cta_slots)
            outs = [run_poisoned(paged_attention_grouped_prefill, work) for _ in range(5)]
            assert worst_error(outs[0], right) < tolerance
            assert all(torch.equal(outs[0], out) for out in outs[1:]), "the result depends on the plan alone"
