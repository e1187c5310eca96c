"""LoRA's two kernels: each row gets what its own adapters add, whatever ranks, types and rows stand beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_cases import expected, make_case

import hf_paged
from hf_paged.kernels.layer.silu_mul import silu_mul
from hf_paged.kernels.lora import _lora_tile
from hf_paged.kernels.lora.lora_expand import (
    ExpandConfig,
    expand_config,
    lora_expand,
    lora_expand_reference,
    lora_expand_silu_mul,
    lora_expand_silu_mul_triton,
    lora_expand_triton,
)
from hf_paged.kernels.lora.lora_order import order_rows
from hf_paged.kernels.lora.lora_shrink import ShrinkConfig, lora_shrink, lora_shrink_reference, lora_shrink_triton
from hf_paged.kernels.lora.lora_table import Adapter, Members, make_tables

pytestmark = pytest.mark.usefixtures("guarded_outputs")
ONE = [[[16, 16, 16]]]
MANY = [[[4, 16, 0], [8, 2, 1]], [[16, 3, 5]], [[0, 0, 0]], [[7, 12, 16]]]
"""Entries of two parts, one part, none, and one; members that some adapters leave out."""


def of_rank(rank):
    """Tolerance for a rank: `make_case` scales by half the rank, and as many products are added up."""
    return 1e-5 * max(1, rank / 16)


def check(case, shrink_config, expand_config, tolerance):
    shrunk = lora_shrink_triton(case.x, case.table, case.order, shrink_config)
    wanted = expected(case)
    actual = lora_expand_triton(case.product, shrunk, case.table, case.order, expand_config)
    torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.each_value
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("dtype", "adapters"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16), (torch.float16, torch.float16),
])
def test_reference(mixed, dtype, adapters):
    case = make_case(1, 23, 40, [24, 8, 12], MANY, dtype=dtype, adapters=adapters, mixed=mixed, bias=True, gap=4)
    wanted = expected(case)
    shrunk = lora_shrink(case.x, case.table, case.order)
    actual = lora_expand(case.product, shrunk, case.table, case.order)
    assert actual is case.product
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < 2 * max(torch.finfo(dtype).eps, torch.finfo(adapters).eps)


@pytest.mark.interpreted
@pytest.mark.parametrize("rank", [1, 2, 5, 8, 16, 17, 31, 32, 48, 64, 80, 130, 256])
def test_ranks(rank):
    case = make_case(rank, 9, 96, [40], [[[rank]]], mixed=False)
    check(case, ShrinkConfig(16, 16, 32, 2, "tf32x3", 4, 2), ExpandConfig(16, 32, "tf32x3", 4), of_rank(rank))


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 100, 300])
@pytest.mark.parametrize("mixed", [False, True])
def test_rows(rows, mixed):
    case = make_case(rows, rows, 70, [33, 16, 7], MANY, mixed=mixed, bias=True, gap=3)
    check(case, ShrinkConfig(32, 16, 32, 3, "tf32x3", 4, 2), ExpandConfig(64, 16, "tf32x3", 4), 1e-5)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("block_r", "rank"), [(16, 40), (32, 9), (64, 16), (64, 5), (64, 70)])
@pytest.mark.parametrize("mixed", [False, True])
def test_tiles_of_several_adapters(block_r, rank, mixed):
    """A tile of ranks may hold many adapters, or a part of one."""
    ranks = [[[rank, 4], [2, rank]], [[3, 0]], [[rank, rank]], [[0, 0]], [[1, rank]]]
    case = make_case(rank, 40, 50, [20, 36], ranks, mixed=mixed, bias=True)
    check(case, ShrinkConfig(16, block_r, 32, 2, "tf32x3", 4, 2), ExpandConfig(32, 16, "tf32x3", 4), of_rank(rank))


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("splits", [1, 4, 8])
def test_members_and_splits(members, splits):
    ranks = [[[3, 9, 16][:members]], [[4, 4, 4][:members]]]
    case = make_case(members, 21, 130, [48, 20, 16][:members], ranks)
    check(case, ShrinkConfig(16, 16, 16, splits, "tf32x3", 4, 2), ExpandConfig(16, 16, "tf32x3", 4), 1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "adapters", "compute"), [
    (torch.float16, torch.float32, torch.float32), (torch.float16, torch.float16, torch.float16),
    (torch.float16, torch.float32, torch.float16), (torch.float32, torch.float16, torch.float16),
])
def test_types(dtype, adapters, compute):
    """The interpreter has no products of bfloat16: those run on a GPU."""
    case = make_case(3, 20, 64, [24, 8], [[[4, 16]], [[8, 8]]], dtype=dtype, adapters=adapters, compute=compute)
    check(case, ShrinkConfig(16, 16, 32, 2, "tf32x3", 4, 2), ExpandConfig(16, 16, "tf32x3", 4), 2e-3)


@pytest.mark.interpreted
def test_float32_adapters_are_not_rounded():
    """Over a half-precision base each product has float32's accuracy, so that only the last rounding shows."""
    case = make_case(4, 16, 128, [32], [[[16]]], dtype=torch.float16, mixed=False)
    wanted = expected(case).to(torch.float16)
    shrunk = lora_shrink_triton(case.x, case.table, None, ShrinkConfig(16, 16, 64, 2, "tf32x3", 4, 2))
    actual = lora_expand_triton(case.product, shrunk, case.table, None, ExpandConfig(16, 32, "tf32x3", 4))
    assert (actual != wanted).float().mean() < 0.005


@pytest.mark.interpreted
@pytest.mark.parametrize("mixed", [False, True])
def test_with_silu_behind_it(mixed):
    ranks = [[[16, 4]], [[0, 8]], [[5, 0]]]
    case = make_case(5, 37, 64, [40, 40], ranks, mixed=mixed, bias=True)
    gate, up = expected(case).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    shrunk = lora_shrink_triton(case.x, case.table, case.order, ShrinkConfig(32, 16, 32, 2, "tf32x3", 4, 2))
    kernel, _ = lora_expand_silu_mul_triton(case.product, shrunk, case.table, case.order,
                                            ExpandConfig(16, 16, "tf32x3", 4))
    plain, _ = lora_expand_silu_mul(case.product, shrunk, case.table, case.order)
    torch.testing.assert_close(kernel.double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(plain.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("rank", [3, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mixed", [False, True])
def test_shrinking_for_the_layer_behind_silu(rank, dtype, mixed):
    case = make_case(rank, 37, 64, [72, 72], [[[16, 4]], [[3, 0]]], dtype=dtype, mixed=mixed)
    behind = make_case(rank, 37, 72, [24], [[[rank]], [[2]]], dtype=dtype, mixed=False)
    shrunk = lora_shrink_triton(case.x, case.table, case.order, ShrinkConfig(32, 16, 32, 2, "tf32x3", 4, 2))
    hidden, sums = lora_expand_silu_mul_triton(case.product, shrunk, case.table, case.order,
                                               ExpandConfig(16, 16, "tf32x3", 4), behind.table)
    assert sums.shape == (5, 37, 1, 1, behind.table.rank)
    wanted = lora_shrink_reference(hidden, behind.table, case.order)
    for entry, own in enumerate([rank, 2]):
        rows = slice(None) if not mixed else case.row_entries == entry
        if mixed or entry == 0:
            torch.testing.assert_close(sums.sum(0)[rows][..., :own], wanted[0][rows][..., :own], rtol=1e-4, atol=1e-3)


@pytest.mark.interpreted
def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: the same row alone among its entry's, and among rows of other entries.

    Of whole numbers, whose sums are exact: the interpreter multiplies with numpy, and on some processors that rounds a
    row of a tile by where it stands there.
    """
    case = make_case(6, 48, 96, [32], [[[8]], [[8]], [[8]]])
    for tensor in (case.x, case.product, *(part for adapter in case.table.adapters() for part in adapter[:2])):
        tensor.mul_(4).round_()
    mixed = [_result(case.x[i : i + 16], case.product[i : i + 16].clone(), case, case.row_entries[i : i + 16])
             for i in (0, 16, 32)]
    for entry in range(3):
        only = torch.full_like(case.row_entries, entry)
        alone = _result(case.x, case.product.clone(), case, only)
        rows = case.row_entries == entry
        assert torch.equal(torch.cat(mixed)[rows], alone[rows])
        assert (alone[rows] != case.product[rows]).float().mean() > 0.9


def _result(x, product, case, row_entries):
    order = order_rows(row_entries, len(case.table.entries))
    shrunk = lora_shrink_triton(x, case.table, order, ShrinkConfig(16, 16, 32, 2, "tf32x3", 4, 2))
    return lora_expand_triton(product, shrunk, case.table, order, ExpandConfig(16, 16, "tf32x3", 4))


@pytest.mark.interpreted
def test_an_unaligned_adapter():
    """Views of a flat optimizer buffer begin anywhere."""
    case = make_case(7, 16, 30, [24], [[[3]]], mixed=False)
    adapter, = case.table.adapters()
    flat = torch.zeros(1000)
    a, b = flat[1:91].view(3, 30).copy_(adapter.a), flat[103:175].view(24, 3).copy_(adapter.b)
    entries = (((adapter._replace(a=a, b=b),),),)
    table, = make_tables([Members(entries, ((0, 24),), torch.float32)], torch.device("cpu"))
    assert not table.aligned
    check(case._replace(table=table), ShrinkConfig(16, 16, 16, 1, "tf32x3", 4, 2), ExpandConfig(16, 32, "tf32x3", 4),
          1e-5)


@pytest.mark.interpreted
def test_nothing_to_do():
    case = make_case(8, 0, 32, [16], [[[4]]], mixed=False)
    check(case, ShrinkConfig(16, 16, 32, 1, "tf32x3", 4, 2), ExpandConfig(16, 32, "tf32x3", 4), 0)


def test_arguments_that_are_refused():
    case = make_case(9, 4, 32, [16], [[[4]]])
    with pytest.raises(ValueError, match=r"entries must be int32 \[T\]"):
        order_rows(case.row_entries.long(), 1)
    with pytest.raises(ValueError, match="1 to 3 members"):
        make_tables([Members((((None,),),), ((0, 4),), torch.float32)], torch.device("cpu"))


def test_reference_leaves_rows_without_an_entry():
    case = make_case(10, 6, 32, [16], [[[4]]])
    nobody = order_rows(torch.full_like(case.row_entries, -1), 1)
    before = case.product.clone()
    shrunk = lora_shrink_reference(case.x, case.table, nobody)
    assert torch.equal(lora_expand_reference(case.product, shrunk, case.table, nobody), before)


SHRINKS = [ShrinkConfig(16, 64, 64, 4, "p", 4, 3), ShrinkConfig(32, 16, 128, 2, "p", 4, 3),
           ShrinkConfig(64, 32, 64, 1, "p", 4, 2), ShrinkConfig(128, 64, 64, 1, "p", 8, 3)]
EXPANDS = [ExpandConfig(16, 128, "p", 4), ExpandConfig(32, 64, "p", 4), ExpandConfig(64, 128, "p", 4),
           ExpandConfig(128, 64, "p", 8)]


@pytest.mark.gpu
@pytest.mark.parametrize(("shrink", "expand"), zip(SHRINKS, EXPANDS, strict=True))
@pytest.mark.parametrize(("dtype", "adapters", "precision"), [
    (torch.bfloat16, torch.float32, "tf32x3"), (torch.bfloat16, torch.float32, "bf16x3"),
    (torch.bfloat16, torch.bfloat16, "low"), (torch.float16, torch.float32, "tf32x3"),
    (torch.float32, torch.float32, "tf32x3"), (torch.float32, torch.bfloat16, "low"),
])
@pytest.mark.parametrize("mixed", [False, True])
def test_on_a_gpu(precision, shrink, expand, dtype, adapters, mixed):
    """Compiled: one rounding of the result for float32 adapters, that of PEFT's types for others."""
    ranks = [[[16, 3, 64]], [[8, 40, 0]], [[0, 1, 16]]]
    case = make_case(1, 150, 520, [264, 128, 72], ranks, dtype=dtype, adapters=adapters, mixed=mixed, bias=True,
                     device="cuda")
    wanted = expected(case)
    before = case.product.double()
    shrunk = lora_shrink_triton(case.x, case.table, case.order, shrink._replace(precision=precision))
    config = expand._replace(precision=precision)
    actual = lora_expand_triton(case.product, shrunk, case.table, case.order, config)
    if adapters == torch.float32:
        # Besides the rounding of the result an error like float32's own.
        rounded = torch.finfo(dtype).eps / 2 * wanted.abs() if dtype != torch.float32 else 0
        assert ((actual.double() - wanted).abs() <= rounded + 2e-6 * (wanted - before).abs().max()).all()
    else:
        assert (actual.double() - wanted).norm() / wanted.norm() < 2 * torch.finfo(adapters).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 100, 256, 300, 1024])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 64])
def test_chosen_configs(rows, adapters, rank):
    case = make_case(2, rows, 1024, [512, 256], [[[rank, rank]], [[rank, 2]]], dtype=torch.bfloat16, adapters=adapters,
                     mixed=rows % 2 == 0, device="cuda")
    wanted = expected(case)
    actual = lora_expand(case.product, lora_shrink(case.x, case.table, case.order), case.table, case.order)
    assert (actual.double() - wanted).norm() / wanted.norm() < 8e-3


def test_early_start_is_for_few_rows(monkeypatch):
    monkeypatch.setattr(_lora_tile, "pdl_options", lambda x: {"PDL": True, "launch_pdl": True})
    case = make_case(1, 33, 40, [16], [[[4]]], mixed=False)
    few, many = case.x[:32], case.x
    assert _lora_tile.early_options(few)["PDL"] and not _lora_tile.early_options(many)["PDL"]
    assert _lora_tile.prefetches(case.table, few) and not _lora_tile.prefetches(case.table, many)
    assert not _lora_tile.prefetches(case.table._replace(aligned=False), few)


def test_a_gate_or_an_up_alone_is_refused_by_the_kernel_that_takes_both():
    case = make_case(5, 7, 64, [40], [[[16]]])
    shrunk = lora_shrink_reference(case.x, case.table, case.order)
    with pytest.raises(ValueError, match="table of 1 members: expected gates and ups, 2"):
        lora_expand_silu_mul_triton(case.product, shrunk, case.table, case.order,
                                    ExpandConfig(16, 16, "tf32x3", 4))


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_with_silu_on_a_gpu(adapters):
    """The same bits as the two operations one after the other."""
    case = make_case(3, 200, 256, [320, 320], [[[16, 8]], [[4, 0]]], dtype=torch.bfloat16, adapters=adapters,
                     device="cuda")
    shrunk = lora_shrink(case.x, case.table, case.order)
    together, _ = lora_expand_silu_mul(case.product.clone(), shrunk, case.table, case.order)
    product = lora_expand(case.product.contiguous(), shrunk, case.table, case.order)
    assert torch.equal(together, silu_mul(product))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 100, 200, 2000])
@pytest.mark.parametrize(("dtype", "adapters", "rank"), [
    (torch.bfloat16, torch.float32, 16), (torch.bfloat16, torch.bfloat16, 16), (torch.bfloat16, torch.float32, 50),
    (torch.float32, torch.float32, 8),
])
def test_shrinking_for_the_layer_behind_silu_on_a_gpu(rows, dtype, adapters, rank):
    options = {"dtype": dtype, "adapters": adapters, "mixed": False, "device": "cuda"}
    case = make_case(1, rows, 256, [384, 384], [[[16, 8]]], **options)
    behind = make_case(2, rows, 384, [128], [[[rank]]], **options).table
    shrunk = lora_shrink(case.x, case.table, None)
    hidden, sums = lora_expand_silu_mul(case.product, shrunk, case.table, None, behind)
    assert (sums is None) == (rows > 1023)
    if sums is not None:
        wanted = lora_shrink_reference(hidden, behind, None)[0, ..., :rank]
        error = (sums.sum(0)[..., :rank] - wanted).norm() / wanted.norm()
        assert error < (1e-5 if adapters == torch.float32 else 1e-4)


PROMPTS = {"rows": 2048, "dtype": "float32", "adapters": "float32"}
STEPS = {"rows": 16, "dtype": "bfloat16", "adapters": "float32"}


@pytest.mark.parametrize(("arch", "shape"), [
    (80, PROMPTS), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((80, STEPS), (90, PROMPTS), (90, STEPS))),
], ids=str)
def test_compiled_for_any_rank_the_code_is_as_short_and_hardly_spills(arch, shape):
    """Without a loop over a rank's tiles, or with half the warps, thousands of bytes a thread are spilled."""
    shapes = [{**shape, "rank": rank} for rank in (64, 128)]
    script = Path(__file__).with_name("compile_lora.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [Path(hf_paged.__file__).parents[1], script.parent, script.parents[2]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    out = subprocess.run([sys.executable, str(script), str(arch), *map(json.dumps, shapes)], env=environment, text=True,
                         capture_output=True, check=True, timeout=240).stdout
    one_tile, two_tiles = map(json.loads, out.splitlines())
    assert two_tiles.keys() - {"rope"} == {"shrink", "expand", "silu"}
    for name, code in two_tiles.items():
        assert code["lines"] < 1.3 * one_tile[name]["lines"], name
        assert code["shared"] <= one_tile[name]["shared"] + 4096, name
        assert code["stack"] <= (0 if name == "shrink" else 400), name


def test_more_warps_are_for_prompts_alone_that_need_the_registers():
    """(rank, inputs, adapters) of tables whose tiles of many rows fit the registers of four warps."""
    few, full, half = [], torch.float32, torch.bfloat16
    for rank in (16, 32, 64, 128):
        for dtype, adapters in ((half, half), (half, full), (torch.float16, full), (full, full), (full, half)):
            case = make_case(1, 2, 32, [16], [[[rank]]], dtype=dtype, adapters=adapters, mixed=False)
            assert expand_config(case.product, case.table).num_warps == 4
            if expand_config(case.product.repeat(512, 1), case.table).num_warps == 4:
                few.append((rank, dtype, adapters))
    assert few == [(16, half, half), (16, half, full), (16, full, half), (32, half, half), (32, half, full),
                   (32, full, half), (64, half, half), (64, full, half)]


@pytest.mark.parametrize("run", ["reference", pytest.param("kernel", marks=pytest.mark.interpreted)])
def test_an_update_that_is_rounded_before_it_is_added(run):
    """In float16 2049 is rounded to 2048, once alone and once as 1 + 2048."""
    adapter = Adapter(torch.tensor([[2049.0] * 4]), torch.ones(16, 1), None, 1.0)
    table, = make_tables([Members((((adapter,),),), ((0, 16),), torch.float32, True)], torch.device("cpu"))
    shrunk = torch.zeros(1, 1, 1, 1, 16)
    shrunk[..., 0] = 2049
    for rounds, wanted in ((True, 2048.0), (False, 2050.0)):
        product, one = torch.ones(1, 16, dtype=torch.float16), table._replace(rounds_delta=rounds)
        if run == "kernel":
            lora_expand_triton(product, shrunk, one, None, expand_config(product, one))
        else:
            lora_expand(product, shrunk, one, None)
        assert product.unique().tolist() == [wanted]
