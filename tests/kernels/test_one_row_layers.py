"""one_row_layers: all layers of one row as the separate operations give them, whoever computes which part."""

from typing import NamedTuple

import pytest
import torch

from hf_paged.kernels import one_row_layers as module
from hf_paged.kernels.one_row_layers import (
    LayerPointers,
    LayersShape,
    Workspace,
    can_be_shared,
    one_row_layers,
    one_row_layers_reference,
    product_of,
    takes,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
EPS = 1e-6
#                    layers, hidden, heads, KV heads, head size, inner, block size
NARROW = LayersShape(2, 64, 4, 2, 16, 72, 16)
UNEVEN = LayersShape(2, 168, 2, 2, 32, 296, 16)  # no width is a multiple of what a warp takes
WIDE = LayersShape(1, 520, 8, 2, 64, 2056, 32)  # rows by several warps each, more tiles than are held


class Case(NamedTuple):
    """Layers of random weights over a cache of noise, and a row that follows `length` tokens."""

    x: torch.Tensor
    layers: list[LayerPointers]
    final_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor

    def to(self, dtype):
        """With tensors of other memory."""
        layers = [LayerPointers(*(None if t is None else t.to(dtype, copy=True) for t in layer))
                  for layer in self.layers]
        floats = {name: getattr(self, name).to(dtype, copy=True) for name in ("x", "final_norm", "cos", "sin")}
        return self._replace(layers=layers, **floats)

    def reference(self, norms, scale):
        return one_row_layers_reference(
            self.x, self.layers, self.final_norm, EPS, EPS if norms else None, self.cos, self.sin, self.position,
            self.slot, self.slot_mapping, self.block_table, scale,
        )

    def run(self, shape, norms, scale, workspace):
        table = torch.tensor([[0 if t is None else t.data_ptr() for t in layer] for layer in self.layers])
        return one_row_layers(
            self.x, shape, table.to(self.x.device), self.final_norm, EPS, EPS if norms else None, self.cos, self.sin,
            self.position, self.slot, self.slot_mapping, self.block_table, scale, workspace,
        )


def make(shape, length, norms=True, dtype=torch.float16, device="cpu", written=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*size, scale=1.0, mean=0.0):
        return (torch.randn(*size, generator=g) * scale + mean).to(dtype).to(device)

    hidden, dim, inner, mixed = shape.hidden, shape.head_dim, shape.inner, shape.heads * shape.head_dim
    needed = -(-(length + 1) // shape.block_size)
    cache = needed + 2, shape.block_size, shape.kv_heads, dim
    layers = [
        LayerPointers(
            normal((shape.heads + 2 * shape.kv_heads) * dim, hidden, scale=hidden**-0.5),
            normal(hidden, mixed, scale=mixed**-0.5), normal(2 * inner, hidden, scale=hidden**-0.5),
            normal(hidden, inner, scale=inner**-0.5), normal(hidden, scale=0.2, mean=1.0),
            normal(hidden, scale=0.2, mean=1.0), normal(dim, scale=0.2, mean=1.0) if norms else None,
            normal(dim, scale=0.2, mean=1.0) if norms else None, normal(*cache), normal(*cache),
        ) for _ in range(shape.num_layers)
    ]
    angles = torch.rand(length + 1, dim // 2, generator=g) * 6
    cos, sin = (torch.cat([table, table], 1).to(dtype).to(device) for table in (angles.cos(), angles.sin()))
    table = torch.full((3, needed + 1), 2**30, dtype=torch.int32)  # what is behind the end is never looked up
    table[1, :needed] = torch.randperm(needed + 1, generator=g)[:needed].int() + 1
    place = int(table[1, length // shape.block_size]) * shape.block_size + length % shape.block_size
    for layer in layers:
        for pool in (layer.k_cache, layer.v_cache):
            pool[int(table[1, needed - 1]), length % shape.block_size :] = torch.nan  # nobody wrote there yet
    return Case(
        normal(1, hidden), layers, normal(hidden, scale=0.2, mean=1.0), cos, sin,
        torch.tensor([length], device=device), torch.tensor([1], dtype=torch.int32, device=device),
        torch.tensor([place if written else -1], device=device), table.to(device),
    )


def assert_like_separate_operations(case, shape, norms, workspace):
    """As near to what fp32 gives without rounding as the separate operations are, in result and cache."""
    scale = shape.head_dim**-0.5
    exact, separate = case.to(torch.float32), case.to(case.x.dtype)
    wanted = exact.reference(norms, scale)
    error = (separate.reference(norms, scale).float() - wanted).abs()
    actual = case.run(shape, norms, scale, workspace)
    assert (actual.float() - wanted).abs().max() <= 1.5 * error.max() + 1e-3
    assert (actual.float() - wanted).abs().mean() <= 1.2 * error.mean() + 1e-4
    for ours, theirs in zip(case.layers, separate.layers, strict=True):
        for name in ("k_cache", "v_cache"):
            a, b = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02, equal_nan=True)
    return actual


@pytest.mark.interpreted
@pytest.mark.parametrize(("shape", "programs", "length", "norms"), [
    (NARROW, 4, 0, True), (NARROW, 8, 1, False), (NARROW, 4, 40, True), (UNEVEN, 8, 15, True),
    (UNEVEN, 4, 300, False), (WIDE, 8, 33, True),
])
def test_interpreted_layers(shape, programs, length, norms):
    case = make(shape, length, norms)
    workspace = Workspace(shape, case.x.device, programs)
    first = assert_like_separate_operations(case, shape, norms, workspace)
    again = case.run(shape, norms, shape.head_dim**-0.5, workspace)  # its key and value are there already
    assert torch.equal(first, again)
    assert int(workspace.epochs) == 1 + 2 * (shape.num_layers + 1)


@pytest.mark.interpreted
def test_interpreted_tokens_that_are_not_written():
    case = make(NARROW, 20, written=False)
    before = [layer.k_cache.clone() for layer in case.layers]
    case.run(NARROW, True, 0.25, Workspace(NARROW, case.x.device, 4))
    assert all(torch.equal(layer.k_cache, old) or (layer.k_cache.isnan() == old.isnan()).all()
               for layer, old in zip(case.layers, before, strict=True))


def test_tiles_cover_all_rows():
    for outputs in (1, 7, 64, 300, 3072, 9728):
        for width in (64, 1024, 2560, 9728, 16384):
            for programs in (1, 8, 128):
                for pairs in (False, True):
                    product = product_of(outputs, width, programs, pairs=pairs)
                    assert product.columns * product.chunks >= width
                    assert product.rows // (1 + pairs) * product.turns * programs >= outputs


@pytest.mark.parametrize("change", [
    {"kv_heads": 3, "heads": 6}, {"head_dim": 48}, {"heads": 6}, {"hidden": 1020}, {"inner": 20000},
    {"kv_heads": 256, "heads": 256}, {"head_dim": 8},
])
def test_sizes_that_cannot_be_shared(change):
    assert can_be_shared(LayersShape(28, 1024, 16, 8, 128, 3072, 16), 128)
    shape = LayersShape(28, 1024, 16, 8, 128, 3072, 16)._replace(**change)
    assert not can_be_shared(shape, 128)
    x = torch.zeros(1, shape.hidden, dtype=torch.float16)
    none = torch.zeros(0)
    with pytest.raises(ValueError, match="128 programs can share"):
        one_row_layers(x, shape, none, none, EPS, None, none, none, none, none, none, none, 1.0,
                       type("W", (), {"programs": 128}))


def test_what_is_refused():
    case = make(NARROW, 3)
    workspace = Workspace(NARROW, case.x.device, 4)
    with pytest.raises(ValueError, match="expected fp16 or bf16"):
        case._replace(x=case.x.float()).run(NARROW, True, 1.0, workspace)
    with pytest.raises(ValueError, match="position"):
        case._replace(position=case.position.int()).run(NARROW, True, 1.0, workspace)
    with pytest.raises(ValueError, match="final_norm"):
        case._replace(final_norm=case.final_norm[:-1]).run(NARROW, True, 1.0, workspace)


def test_no_gpu_takes_nothing():
    assert not takes(NARROW, torch.float16, torch.device("cpu"))


SMALL = LayersShape(28, 1024, 16, 8, 128, 3072, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "length", "norms"), [
    (SMALL, 0, True), (SMALL, 383, True), (SMALL._replace(num_layers=4), 5000, False),
    (LayersShape(3, 2048, 16, 8, 128, 6144, 16), 100, True), (LayersShape(3, 2560, 32, 8, 128, 9728, 16), 700, True),
    (LayersShape(2, 4096, 32, 8, 128, 14336, 32), 65, False), (LayersShape(4, 160, 8, 2, 32, 416, 16), 31, True),
])
def test_layers_on_a_gpu(shape, length, norms, dtype):
    case = make(shape, length, norms, dtype, "cuda")
    assert takes(shape, dtype, case.x.device)
    assert_like_separate_operations(case, shape, norms, Workspace(shape, case.x.device))


@pytest.mark.gpu
def test_many_launches_give_the_same_bits():
    """Also when tags come round to their beginning, and from a graph."""
    shape = SMALL._replace(num_layers=6)
    case = make(shape, 200, dtype=torch.bfloat16, device="cuda")
    workspace = Workspace(shape, case.x.device)
    first = case.run(shape, True, 0.1, workspace).clone()
    workspace.epochs.fill_(65000)
    for _ in range(50):
        assert torch.equal(case.run(shape, True, 0.1, workspace), first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        table = torch.tensor([[t.data_ptr() for t in layer] for layer in case.layers], device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = module.one_row_layers_unchecked(
                case.x, shape, table, case.final_norm, EPS, EPS, case.cos, case.sin, case.position, case.slot,
                case.slot_mapping, case.block_table, 0.1, workspace,
            )
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
    assert int(workspace.epochs) > 70000
