"""Attention of packed tokens by windows: the reference is sdpa of each window, and the kernel as near to float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from hf_paged.kernels.attention import windowed
from hf_paged.kernels.attention.windowed import (
    WindowedConfig,
    Windows,
    windowed_attention,
    windowed_attention_reference,
    windowed_attention_triton,
    windowed_config,
)

EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Whole tiles of keys, parts of one, one token, none; the last window has three tiles of queries.
LENGTHS = [64, 5, 0, 1, 128, 63, 300]


def make(dim, dtype, lengths=LENGTHS, *, heads=2, kv_heads=2, device="cpu"):
    """Return q, k, v of one product, as slices of it, and windows."""
    windows = Windows(np.cumsum([0, *lengths]))
    g = torch.Generator().manual_seed(dim)
    packed = torch.randn(windows.num_tokens, heads + 2 * kv_heads, dim, generator=g).to(device, dtype)
    return *packed.split([heads, kv_heads, kv_heads], 1), windows


def assert_exact(attend, q, k, v, windows):
    """Within what rounding of weights, of the result, and in float32 of scores costs: values are of order one, and
    weights add up to 1."""
    scale = q.shape[2] ** -0.5
    exact = windowed_attention_reference(q.double(), k.double(), v.double(), windows, scale)
    found = attend(q, k, v, windows, scale)
    assert found.dtype == q.dtype and found.shape == q.shape and found.is_contiguous()
    error = (found.double() - exact).abs()
    stock = (windowed_attention_reference(q, k, v, windows, scale).double() - exact).abs()
    assert (error <= EPS[q.dtype] * (4 + exact.abs()) + 2.0**-19).all()
    assert error.mean() <= 1.5 * stock.mean() + 1e-9


DIMS = [8, 64, 72, 80, 96, 112, 128, 144]
ON_GPU = [pytest.param(dim, dtype, marks=pytest.mark.gpu) for dim in (*DIMS, 256) for dtype in EPS]


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", DIMS)
def test_the_kernel_is_exact(dim, dtype):
    assert_exact(windowed_attention_triton, *make(dim, dtype))


@pytest.mark.parametrize(("dim", "dtype"), ON_GPU)
def test_the_kernel_is_exact_on_a_gpu(dim, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_exact(windowed_attention, *make(dim, dtype, device="cuda"))
    assert_exact(windowed_attention, *make(dim, dtype, [64] * 9, heads=4, device="cuda"))


@pytest.mark.interpreted
def test_a_tail_of_a_window_is_exact():
    """With one group of warps, which the simulated GPU has as well."""
    attend = partial(windowed_attention_triton, config=WindowedConfig(64, 64, 4, 3))
    assert_exact(attend, *make(80, torch.float16, [21, 200], heads=1, kv_heads=1))


@pytest.mark.interpreted
def test_heads_share_keys():
    assert_exact(windowed_attention_triton, *make(16, torch.float32, [20, 70], heads=6))


@pytest.mark.interpreted
def test_nothing_outside_of_a_window_is_seen():
    """Neither tokens of others, nor what lies behind the last one or between heads."""
    q, k, v, windows = make(72, torch.float32, [70, 3, 65])
    expected = windowed_attention_triton(q, k, v, windows, 0.2)
    for x in (k, v):
        x[70:73] = float("nan")
    found = windowed_attention_triton(q, k, v, windows, 0.2)
    outside = torch.ones(len(q), dtype=torch.bool).index_fill(0, torch.arange(70, 73), False)
    assert torch.equal(found[outside], expected[outside]) and found[70:73].isnan().all()


@pytest.mark.interpreted
def test_a_window_has_the_same_bits_beside_others():
    """Of short windows alone the tiles are smaller."""
    q, k, v, windows = make(80, torch.float16, [64, 40])
    alone = windowed_attention_triton(q, k, v, windows, 0.1)
    more = [torch.cat([x, x, x]) for x in (q, k, v)]
    beside = windowed_attention_triton(*more, Windows(np.array([0, 64, 104, 312])), 0.1)
    assert torch.equal(beside[:104], alone)


@pytest.mark.interpreted
def test_any_layout():
    """Strides that are no multiples of 16 bytes, and a first element that does not lie at one."""
    q, k, v, windows = make(16, torch.float16, [40])
    odd = [torch.zeros(40 * 2 * 17 + 1, dtype=q.dtype)[1:].as_strided(q.shape, (34, 17, 1)).copy_(x) for x in (q, k, v)]
    assert torch.equal(windowed_attention_triton(*odd, windows, 0.3), windowed_attention_triton(q, k, v, windows, 0.3))


@pytest.mark.parametrize(("dim", "lanes"), [(8, (16, 0)), (16, (16, 0)), (24, (32, 0)), (40, (32, 16)), (64, (64, 0)),
                                            (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (112, (128, 0)),
                                            (128, (128, 0)), (144, (128, 16)), (256, (256, 0))])
def test_lanes_of_a_head(dim, lanes):
    assert windowed._lanes(dim) == lanes


@pytest.mark.parametrize("memory", [227 << 10, 99 << 10])
def test_keys_come_in_equal_tiles_whatever_the_windows(memory):
    for itemsize in (2, 4):
        for dim in DIMS:
            short, long = (windowed_config(dim, itemsize, length, memory) for length in (64, 4096))
            assert short.block_n == long.block_n and short.block_m <= long.block_m


def test_tiles_are_made_once_for_a_size():
    windows = Windows(np.array([0, 3, 3, 10]))
    tiles = windows.tiles(4, torch.device("cpu"))
    assert tiles.tolist() == [[0, 0, 3], [3, 3, 10], [7, 3, 10]] and windows.longest == 7
    assert windows.tiles(4, torch.device("cpu")) is tiles and len(windows.tiles(16, torch.device("cpu"))) == 2


@pytest.mark.parametrize("starts", [[0], [1, 2], [0, 5, 3]])
def test_windows_ascend_from_0(starts):
    with pytest.raises(ValueError, match="ascend from 0"):
        Windows(np.array(starts))


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k, v, windows: (q[:-1], k[:-1], v[:-1], windows, 1.0), "q: "),
    (lambda q, k, v, windows: (q, k[..., :8], v, windows, 1.0), "k: "),
    (lambda q, k, v, windows: (q, k, v.half(), windows, 1.0), "v: "),
    (lambda q, k, v, windows: (q, k, v, windows, 0.0), "scale above 0"),
    (lambda q, k, v, windows: (q.double(), k.double(), v.double(), windows, 1.0), "torch.float64"),
], ids=["tokens", "sizes", "dtypes", "scale", "dtype"])
def test_other_tensors_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        windowed_attention(*change(*make(16, torch.float32, [4])))


def test_without_tokens():
    q, k, v, windows = make(16, torch.float32, [0, 0])
    assert windowed_attention_triton(q, k, v, windows, 1.0).shape == (0, 2, 16)
