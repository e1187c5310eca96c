"""The norm that adds what LoRA owes and shrinks for the next layers: what the three operations give one by one."""

from __future__ import annotations

import pytest
import torch
from kernels.lora_cases import make_case

from hf_paged.kernels import lora_add_rms_norm as module
from hf_paged.kernels import lora_order
from hf_paged.kernels.add_rms_norm import add_rms_norm_reference
from hf_paged.kernels.lora_add_rms_norm import lora_add_rms_norm_triton, lora_add_rms_norm_unchecked
from hf_paged.kernels.lora_expand import Delta, lora_expand_reference
from hf_paged.kernels.lora_shrink import lora_shrink, lora_shrink_reference

pytestmark = pytest.mark.usefixtures("guarded_outputs")
EPS = 1e-6
ONE = [[[16]]]
PARTS = [[[4], [16]], [[7], [0]], [[0], [0]], [[16], [3]]]
"""Entries of two parts, one, none, and two."""


class Case:
    """A product [T, width] with what is owed to it, a residual, and a table of the layers that read the norm."""

    def __init__(self, rows, width, owed=ONE, following=ONE, *, sizes=(24,), mixed=False, **options):
        self.before = make_case(rows, rows, 40, [width], owed, mixed=mixed, **options)
        self.following = make_case(rows + 1, rows, width, list(sizes), following, mixed=False, **options).table
        case = self.before
        self.product = case.product[:, :width]
        self.order = case.order
        self.delta = Delta(lora_shrink(case.x, case.table, case.order), case.table, case.order)
        g = torch.Generator().manual_seed(rows)
        wide = torch.randn(rows, width + 8, generator=g).to(self.product)
        self.residual, self.weight = wide[:, :width], (1 + 0.3 * torch.randn(width, generator=g)).to(self.product)

    def one_by_one(self, delta=True, residual=True):
        product = self.product.clone()
        if delta:
            lora_expand_reference(product, *self.delta)
        normed, summed = add_rms_norm_reference(product, self.residual if residual else None, self.weight, EPS)
        return normed, summed, lora_shrink_reference(normed, self.following, self.order).sum(0)

    def check(self, run, tolerance, delta=True, residual=True, following=True):
        wanted = self.one_by_one(delta, residual)
        before = self.product.clone()
        made = run(self.product, self.delta if delta else None, self.residual if residual else None, self.weight, EPS,
                   self.following if following else None)
        for actual, expected in zip(made[:2], wanted[:2], strict=True):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(self.product, before)
        assert (made[2] is not None) == following
        if following:
            self.check_sums(made[2].sum(0), wanted[2], tolerance)

    def on_any_device(self, product, delta, residual, weight, eps, following):
        """By the kernels where they fit; one after the other, which writes the product, where they do not."""
        return lora_add_rms_norm_unchecked(product.clone(), delta, residual, weight, eps, None, following, self.order)

    def check_sums(self, actual, wanted, tolerance):
        """Where an entry has no adapter sums are undefined."""
        entries = (torch.zeros(len(actual), dtype=torch.int32, device=actual.device) if self.order is None
                   else self.order.entries)
        for e, entry in enumerate(self.following.entries):
            for p, part in enumerate(entry):
                for j, adapter in enumerate(part):
                    if adapter is not None:
                        at = entries == e, p, j, slice(len(adapter.a))
                        found, expected = (t[at[0]][:, p, j, at[3]] for t in (actual, wanted))
                        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=20 * tolerance)


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("width", [64, 200, 1100])
def test_rows_and_widths(rows, width):
    """One program's columns, several programs', and several turns of each."""
    Case(rows, width).check(lora_add_rms_norm_triton, 1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("mixed", [True, False])
def test_prompts(mixed, monkeypatch):
    """Rows of which a program takes more, and all their columns."""
    monkeypatch.setattr(module, "_MANY_ROWS", 60)
    monkeypatch.setattr(lora_order, "_MANY_ROWS", 60)
    Case(140, 300, PARTS, PARTS, mixed=mixed).check(lora_add_rms_norm_triton, 1e-5)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("following", [True, False])
def test_what_there_is(delta, residual, following):
    case = Case(5, 300)
    case.check(case.on_any_device, 1e-5, delta, residual, following)


@pytest.mark.interpreted
@pytest.mark.parametrize("following", [[[[16, 16, 16]]] * 4, [[[5, 0, 2]], [[0, 9, 0]], [[0, 0, 0]], [[1, 1, 16]]]])
@pytest.mark.parametrize("bias", [True, False])
def test_adapters_row_by_row(following, bias):
    """Also rows of none."""
    Case(40, 136, PARTS, following, sizes=(8, 24, 16), mixed=True, bias=bias).check(lora_add_rms_norm_triton, 1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("rank", [1, 17, 64, 80])
def test_ranks(rank):
    Case(9, 130, [[[rank]]], [[[rank, 3]]], sizes=(16, 8)).check(lora_add_rms_norm_triton, 1e-5)


@pytest.mark.interpreted
def test_lower_precision():
    Case(21, 264, dtype=torch.float16).check(lora_add_rms_norm_triton, 2e-3)
    Case(21, 264, dtype=torch.float16, adapters=torch.float16).check(lora_add_rms_norm_triton, 2e-3)


@pytest.mark.interpreted
def test_nothing_to_do():
    Case(0, 64).check(lora_add_rms_norm_triton, 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_one_after_the_other_on_a_cpu(mixed):
    case = Case(30, 96, PARTS, PARTS, mixed=mixed)
    case.check(case.on_any_device, 1e-5)


def test_what_the_kernels_take():
    """Tensors of one dtype, and adapters of one, on all columns."""
    case = Case(20, 64)

    def takes(delta=case.delta, residual=case.residual, weight=case.weight, dtype=None, following=case.following):
        return module._fits(case.product, delta, residual, weight, dtype, following)

    assert takes() and takes(dtype=torch.float32)
    assert not takes(dtype=torch.bfloat16)
    assert not takes(residual=case.residual.half())
    assert not takes(weight=case.weight.half())
    assert not takes(following=make_case(1, 20, 64, [64], ONE, adapters=torch.bfloat16).table)
    some = make_case(1, 20, 40, [24], ONE, mixed=False, gap=4).table
    assert not takes(delta=case.delta._replace(table=some))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 100, 256, 1500])
@pytest.mark.parametrize("width", [1024, 2560, 4096, 1000])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_on_a_gpu(rows, width, adapters, mixed):
    ranks = [[[16, 16, 16]], [[8, 0, 16]], [[1, 16, 3]]]
    case = Case(rows, width, [[[16]], [[4]], [[0]]], ranks, sizes=(64, 32, 32), mixed=mixed, dtype=torch.bfloat16,
                adapters=adapters, device="cuda")
    wanted = case.one_by_one()
    made = case.on_any_device(case.product, case.delta, case.residual, case.weight, EPS, case.following)
    for actual, expected in zip(made[:2], wanted[:2], strict=True):
        # Other sums of squares, and values that lie between two: some are off by one rounding.
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)
        assert (actual != expected).float().mean() < 0.01
    case.check_sums(made[2].sum(0), lora_shrink_reference(made[0], case.following, case.order).sum(0), 2e-5)
