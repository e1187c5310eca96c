"""Copies in another dtype: torch's own rounding, any views, and nothing written where nothing changed."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.cast_copies import CHUNK, CopyPlan, copies_reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def on_cpu(sources, targets, *sums):
    CopyPlan(targets)(sources, *sums)


def interpreted(sources, targets, *sums):
    CopyPlan(targets).launch(sources, *sums)


def on_gpu(sources, targets, *sums):
    """Over copies of the memory that the views lie in, which are written back."""
    moved = [[t.untyped_storage().cuda() for t in tensors] for tensors in (sources, targets)]

    def like(tensor, storage):
        return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(storage, tensor.storage_offset(), tensor.shape,
                                                                     tensor.stride())

    on_device = [list(map(like, *pair)) for pair in zip((sources, targets), moved, strict=True)]
    CopyPlan(on_device[1])(on_device[0], *(None if s is None else s.cuda() for s in sums))
    for target, storage in zip(targets, moved[1], strict=True):
        target.copy_(like(target, storage))


EVERYWHERE = [
    on_cpu,
    pytest.param(interpreted, marks=pytest.mark.interpreted),
    pytest.param(on_gpu, marks=pytest.mark.gpu),
]


def values(shape, dtype, seed=0):
    """Ordinary ones, ties of rounding, what overflows or vanishes in fp16, zeros of both signs, infinities."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=g) * 3
    flat = found.view(-1)
    special = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, 65520.0, -7e4, 1e-8, 6e-8, 3e38,
                            float("inf"), -float("inf")])
    flat[: len(special)] = special[: flat.numel()]
    return found.to(dtype)


def pairs_of(source_dtype, target_dtype):
    """Sizes around a tile and a chunk, odd addresses, rows that are strided on either side, an empty tensor.

    Of the strided rows some begin at an aligned address and have more elements than a tile.
    """
    odd = torch.empty(4999, dtype=target_dtype)
    stacked = torch.full((64, 96), 7.0, dtype=target_dtype)
    wide = values((300, 200), source_dtype, 5)
    whole = values((3, 257, 65), source_dtype, 6)
    pairs = [
        (values(CHUNK + 4096 + 17, source_dtype, 1), torch.empty(CHUNK + 4096 + 17, dtype=target_dtype)),
        (values((64, 64), source_dtype, 2), torch.empty(64, 64, dtype=target_dtype)),
        (values(5000, source_dtype, 3)[1:], odd),
        (values((64, 16), source_dtype, 4), stacked[:, 32:48]),
        (wide[:, 3:133], torch.empty(300, 130, dtype=target_dtype)),
        (wide[:, 64:192], torch.empty(300, 128, dtype=target_dtype)),
        (whole[1:], torch.empty(2, 257, 65, dtype=target_dtype)),
        (torch.empty(0, 8, dtype=source_dtype), torch.empty(0, 8, dtype=target_dtype)),
    ]
    return pairs, stacked


@pytest.mark.each_value
@pytest.mark.parametrize("run", EVERYWHERE)
@pytest.mark.parametrize("target_dtype", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_copies_are_torchs(run, source_dtype, target_dtype):
    if run is interpreted and target_dtype is torch.bfloat16 and source_dtype is not torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    pairs, stacked = pairs_of(source_dtype, target_dtype)
    run([source for source, _ in pairs], [target for _, target in pairs])
    for source, target in pairs:
        assert torch.equal(target, source.to(target_dtype))
    assert (stacked[:, :32] == 7).all()
    assert (stacked[:, 48:] == 7).all()


@pytest.mark.parametrize("run", EVERYWHERE)
def test_several_dtypes_at_once(run):
    sources = [values(100, dtype, seed) for seed, dtype in enumerate(FLOATS)]
    targets = [torch.empty(100, dtype=torch.float16) for _ in sources]
    run(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(torch.float16))


@pytest.mark.parametrize("run", EVERYWHERE)
@pytest.mark.parametrize("changed", [False, True])
def test_nothing_is_written_where_the_sums_are_equal(run, changed):
    source, target = values((70, 70), torch.float32), torch.full((70, 70), 3.0, dtype=torch.float16)
    run([source], [target], torch.tensor([2**40 + changed]), torch.tensor([2**40]))
    assert torch.equal(target, source.half()) if changed else (target == 3).all()


@pytest.mark.parametrize("run", ["on_cpu", pytest.param("launch", marks=pytest.mark.interpreted)])
def test_a_plan_follows_sources_that_move_or_are_viewed_otherwise(run):
    targets = [torch.empty(8, 6, dtype=torch.float16), torch.empty(5, dtype=torch.float16)]
    plan = CopyPlan(targets)
    copy = plan if run == "on_cpu" else plan.launch
    memory, other = values((16, 12), torch.float32, 1), values(5, torch.float32, 2)
    at_one_address = [memory[:8, :6], memory[::2, :6], memory.view(-1)[:48].view(8, 6)]
    at_one_address += [source.view(torch.float16)[:, :6] for source in (memory[:8], memory[8:])]
    for source in [*at_one_address, *at_one_address[::-1], memory.clone()[:8, :6]]:
        for tensor in targets:
            tensor.fill_(7)
        copy([source, other])
        assert torch.equal(targets[0].view(torch.int16), source.half().view(torch.int16))
        assert torch.equal(targets[1], other.half())


@pytest.mark.interpreted
def test_a_plan_that_refused_sources_copies_the_next_ones():
    target = torch.empty(4, 4, dtype=torch.float16)
    plan, source = CopyPlan([target]), values((4, 4), torch.float32)
    for launch in (plan, plan.launch):
        launch([source])
        with pytest.raises(ValueError, match="expected equal shapes"):
            launch([source.view(2, 8)])
        target.zero_()
        launch([source])
        assert torch.equal(target, source.half())


def test_without_sources_no_sums_are_read():
    """They would be waited for, on a GPU."""
    unreadable = torch.empty(1, dtype=torch.int64, device="meta")
    CopyPlan([])([], unreadable, unreadable)


def test_what_cannot_be_copied():
    source = torch.randn(4, 4)
    for bad, target in [(source, torch.empty(4, 5)), (source, torch.empty(4, 4, dtype=torch.float64)),
                        (source.int(), torch.empty(4, 4))]:
        with pytest.raises(ValueError, match="expected equal shapes, and fp32, fp16 or bf16"):
            CopyPlan([target])([bad])
    with pytest.raises(ValueError, match="rows that are contiguous"):
        CopyPlan([torch.empty(4, 4, dtype=torch.float16)]).launch([source.t()])


def test_reference_works_on_parameters_and_leaves_no_graph():
    source, target = torch.nn.Parameter(torch.randn(3, 3)), torch.empty(3, 3, dtype=torch.bfloat16)
    copies_reference([source], [target])
    assert not target.requires_grad
    assert torch.equal(target, source.detach().bfloat16())
