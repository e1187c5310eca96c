"""Where the torch backend finds a step's keys and values: worked out once, and the right places."""

import random

import numpy as np
import pytest
import torch
from paged_cases import expected, make_case, random_rows, worst_error

from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention.reference import host_rows_of
from hf_paged.kernels.attention.types import AttentionSpec, PagedMetadata

SIZE, HEADS, DIM = 16, 2, 4


def layout(blocks, new, length):
    """One row of `new` of `length` tokens in these blocks."""
    table = torch.tensor([blocks], dtype=torch.int32)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, new], [length], [0])]
    return PagedMetadata(ints[0], ints[1], table, ints[2], torch.zeros(new, dtype=torch.int64), new, length)


@pytest.mark.parametrize("blocks", [[3, 4, 5], [5, 4, 3], [2, 7, 4], [6]])
@pytest.mark.parametrize("window", [None, 1, 16, 23])
@pytest.mark.parametrize("new", [1, 5])
def test_a_row_is_read_in_place_where_its_blocks_follow_each_other(blocks, window, new):
    caches = torch.arange(2 * 8 * SIZE * HEADS * DIM, dtype=torch.float32).view(2, 8, SIZE, HEADS, DIM)
    cache = caches[1]  # has an offset
    length = len(blocks) * SIZE - 3
    [row] = host_rows_of(layout(blocks, new, length), SIZE, HEADS * DIM).reads(window).single
    read = row.pages.read(cache)
    begin = 0 if window is None else max(0, length - new - window + 1)
    position = np.arange(begin, length)
    slots = torch.tensor(blocks)[position // SIZE] * SIZE + torch.from_numpy(position % SIZE)
    assert torch.equal(read, cache.flatten(0, 1)[slots].transpose(0, 1)[:, None])
    used = blocks[begin // SIZE :]
    is_view = read.untyped_storage().data_ptr() == caches.untyped_storage().data_ptr()
    assert is_view == (used == list(range(used[0], used[0] + len(used))))


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_share_what_was_read_once_compute_the_same(seed):
    """Whatever their windows are."""
    r = random.Random(seed)
    case = make_case(random_rows(r, r.randint(1, 6), 60, 20), seed=seed, window=r.choice([None, 7, 33]))
    torch_backend = BACKENDS["torch"]
    block_size, heads, dim = case.k_cache.shape[1:]
    spec = AttentionSpec(case.q.shape[1], heads, dim, case.q.dtype, case.q.device, block_size)
    meta = torch_backend.read_once(case.meta, spec)
    assert meta.host_rows is not None
    meta.host_rows.reads(5)
    for _ in range(2):
        out = torch_backend.run(case.q, case.k_cache, case.v_cache, meta, case.options)
        assert worst_error(out, expected(case)) < 5e-6
    assert meta.host_rows.reads(case.options.window) is meta.host_rows.reads(case.options.window)


def test_backends_that_read_on_the_device_are_given_nothing():
    meta = layout([1], 1, 5)
    spec = AttentionSpec(2, 1, 8, torch.float32, torch.device("cpu"), SIZE)
    assert all(backend.read_once(meta, spec) is meta for name, backend in BACKENDS.items() if name != "torch")
