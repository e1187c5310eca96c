"""q, k and v that LoRA's part is added to on their way to attention: what the two operations give one by one."""

from __future__ import annotations

import pytest
import torch
from lora_cases import make_case

from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store_reference
from hf_paged.kernels.lora import lora_order
from hf_paged.kernels.lora import lora_qk_norm_rope_store as module
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_reference
from hf_paged.kernels.lora.lora_qk_norm_rope_store import (
    lora_qk_norm_rope_store,
    lora_qk_norm_rope_store_triton,
)
from hf_paged.kernels.lora.lora_shrink import lora_shrink

pytestmark = pytest.mark.usefixtures("guarded_outputs")
EPS = 1e-6
ONE = [[[16, 16, 16]]]
MANY = [[[4, 16, 0], [8, 2, 1]], [[16, 3, 5]], [[0, 0, 0]], [[7, 12, 16]]]


class Case:
    def __init__(self, rows, ranks, *, heads=4, kv_heads=2, head_dim=32, norms=True, members=(0, 1, 2), **options):
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        firsts = [0, sizes[0], sizes[0] + sizes[1]]
        ranks = [[[part[j] for j in members] for part in entry] for entry in ranks]
        case = make_case(rows, rows, 48, [sizes[j] for j in members], ranks, **options)
        table = case.table._replace(columns=tuple((firsts[j], sizes[j]) for j in members))
        self.delta = Delta(lora_shrink(case.x, case.table, case.order), table, case.order)
        g = torch.Generator().manual_seed(rows)

        def draw(*shape):
            return torch.randn(*shape, generator=g).to(case.product)

        self.qkv = draw(rows, sum(sizes) + 8)[:, :-8]
        weights = (1 + 0.3 * draw(head_dim), 1 + 0.3 * draw(head_dim)) if norms else (None, None)
        positions = torch.randint(0, 40, (rows,), generator=g).to(case.x.device)
        slots = torch.randperm(4 * 16 * (1 + rows // 32), generator=g)[:rows].to(case.x.device)
        slots[torch.rand(rows, generator=g) < 0.3] = -1
        self.args = *weights, EPS, draw(40, head_dim), draw(40, head_dim), positions, slots
        self.caches = draw(2, 4 * (1 + rows // 32), 16, kv_heads, head_dim)

    def both(self, run):
        """What `run` makes and writes, and the two operations one by one."""
        results = []
        for each in (run, one_by_one):
            caches = self.caches.clone()
            results.append((each(self.qkv.clone(), self.delta, HeadsToCache(*self.args, *caches)), caches))
        return results

    def check(self, run, tolerance):
        (query, caches), (wanted, wanted_caches) = self.both(run)
        torch.testing.assert_close(query, wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(caches, wanted_caches, rtol=tolerance, atol=tolerance)


def one_by_one(qkv, delta, heads):
    return qk_norm_rope_store_reference(lora_expand_reference(qkv, *delta), heads)


@pytest.mark.interpreted
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_any_number_of_rows_with_and_without_head_norms(rows, norms):
    Case(rows, ONE, norms=norms, mixed=False).check(lora_qk_norm_rope_store_triton, 2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_head_sizes_that_do_not_fill_a_tile(head_dim):
    Case(7, ONE, head_dim=head_dim, mixed=False).check(lora_qk_norm_rope_store_triton, 2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("bias", [True, False])
def test_each_row_gets_what_its_own_adapters_add(bias):
    Case(40, MANY, bias=bias).check(lora_qk_norm_rope_store_triton, 2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("members", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_layers_without_adapters_between(members):
    Case(20, ONE, members=members, mixed=False).check(lora_qk_norm_rope_store_triton, 2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("adapters", [torch.float32, torch.float16])
def test_half_precision_with_adapters_of_either_dtype(adapters):
    Case(21, ONE, dtype=torch.float16, adapters=adapters, mixed=False).check(lora_qk_norm_rope_store_triton, 2e-2)


@pytest.mark.interpreted
@pytest.mark.parametrize("mixed", [True, False])
def test_tiles_of_many_rows_give_the_same_as_those_of_few(mixed, monkeypatch):
    monkeypatch.setattr(lora_order, "MANY_ROWS", 60)
    Case(140, MANY, mixed=mixed).check(lora_qk_norm_rope_store_triton, 2e-5)


@pytest.mark.interpreted
def test_no_rows_at_all_launch_nothing():
    Case(0, ONE, mixed=False).check(lora_qk_norm_rope_store_triton, 0)


def test_on_a_cpu_the_two_operations_run_one_by_one():
    Case(33, MANY).check(lora_qk_norm_rope_store, 1e-5)


def test_one_launch_is_for_few_rows_and_adapters_of_whole_heads():
    case = Case(20, ONE, mixed=False)
    k_cache = case.caches[0]
    assert module._is_one_launch(case.qkv, case.delta, k_cache)
    assert not module._is_one_launch(case.qkv.repeat(52, 1), case.delta, k_cache)
    half_a_head = case.delta._replace(table=case.delta.table._replace(columns=((0, 16),)))
    assert not module._is_one_launch(case.qkv, half_a_head, k_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 100, 256, 300])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"norms": False}, {"members": (0, 2)}, {"head_dim": 64}, {"bias": True}],
                         ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_gpu_kernel_gives_what_the_two_operations_give(rows, adapters, options, mixed):
    case = Case(rows, MANY, heads=16, kv_heads=8, dtype=torch.bfloat16, adapters=adapters, device="cuda", mixed=mixed,
                **({"head_dim": 128} | options))
    for actual, expected in zip(*case.both(lora_qk_norm_rope_store), strict=True):
        # Other sums, and values that lie between two: some are off by one rounding, which RoPE's differences show.
        assert (actual.double() - expected.double()).norm() / expected.double().norm() < 2e-3
        assert (actual != expected).float().mean() < 0.03
