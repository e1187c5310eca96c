"""store_kv: the right slots, and only those, get the new keys and values."""

import random

import pytest
import torch

from hf_paged.kernels.layer.store_kv import check_tokens, store_kv, store_kv_reference, store_kv_triton


def _inputs(seed, device="cpu", dtype=None, shape=None):
    r = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    dtype = dtype or r.choice([torch.float32, torch.float16, torch.bfloat16])
    heads, head_dim = shape or (r.choice([1, 2, 3, 8]), r.choice([32, 64, 80, 96, 128, 256]))
    block_size = r.choice([16, 32, 256])
    tokens, num_blocks = r.randint(1, 20), 5
    # Keys and values are parts of one qkv tensor: strided in their first dim.
    qkv = torch.randn(tokens, heads * 4, head_dim, generator=g).to(dtype)
    slots = torch.randperm(num_blocks * block_size, generator=g)[:tokens]
    slots[torch.rand(tokens, generator=g) < 0.3] = -1
    if not (slots == 0).any():
        slots[r.randrange(tokens)] = 0
    caches = [torch.randn(num_blocks, block_size, heads, head_dim, generator=g).to(dtype).to(device) for _ in range(2)]
    qkv = qkv.to(device)
    return qkv[:, heads * 2 : heads * 3], qkv[:, heads * 3 :], *caches, slots.to(device)


def _check(store, arguments):
    key, value, k_cache, v_cache, slots = arguments
    right = [k_cache.clone(), v_cache.clone()]
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            right[0][slot // block_size, slot % block_size] = key[token]
            right[1][slot // block_size, slot % block_size] = value[token]
    store(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache, right[0])
    assert torch.equal(v_cache, right[1])


@pytest.mark.parametrize("seed", range(10))
def test_reference(seed):
    _check(store_kv_reference, _inputs(seed))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(10))
def test_triton(seed):
    _check(store_kv_triton, _inputs(seed))


@pytest.mark.parametrize("store", [store_kv, pytest.param(store_kv_triton, marks=pytest.mark.interpreted)])
def test_nothing_to_write(store):
    key, value, k_cache, v_cache, slots = _inputs(1)
    _check(store, (key, value, k_cache, v_cache, torch.full_like(slots, -1)))
    _check(store, (key[:0], value[:0], k_cache, v_cache, slots[:0]))


@pytest.mark.parametrize("store", [store_kv, pytest.param(store_kv_triton, marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("shape", [(3, 64), (8, 256), (5, 80)], ids=str)
def test_value_strided_unlike_key(store, shape):
    """Also heads past the 1,024 elements that one program copies."""
    key, value, *rest = _inputs(2, shape=shape)
    _check(store, (key, value.transpose(0, 1).contiguous().transpose(0, 1), *rest))


def _with_unlike_values(arguments, size):
    key, value, k_cache, v_cache, slots = arguments
    repeats = -(-size // value.shape[2])
    value, v_cache = (x.repeat(*[1] * (x.dim() - 1), repeats)[..., :size] for x in (value, v_cache))
    return key, value, k_cache, v_cache.contiguous(), slots


@pytest.mark.parametrize("store", [store_kv_reference, pytest.param(store_kv_triton, marks=pytest.mark.interpreted)])
@pytest.mark.parametrize(("shape", "size"), [((8, 192), 128), ((3, 24), 16), ((2, 24), 640), ((1, 16), 17)], ids=str)
def test_values_of_another_size_than_keys(store, shape, size):
    _check(store, _with_unlike_values(_inputs(4, shape=shape), size))


def test_tokens_that_are_refused():
    key, value, k_cache, v_cache, slots = _inputs(3, dtype=torch.float32)
    for arguments, message in [
        ((key[:-1], value, k_cache, v_cache, slots), "T, Hkv, D"),
        ((key, value, k_cache, v_cache[:-1], slots), "num_blocks"),
        ((key.double(), value, k_cache, v_cache, slots), "dtype"),
        ((key, value, k_cache, v_cache, slots.int()), "int64"),
        ((key, value, k_cache.transpose(0, 1), v_cache.transpose(0, 1), slots), "contiguous"),
        ((key.transpose(0, 2).contiguous().transpose(0, 2), value, k_cache, v_cache, slots), "last dim"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_tokens(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_gpu(seed):
    _check(store_kv, _inputs(seed, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "size"), [((8, 192), 128), ((3, 24), 16), ((2, 24), 640)], ids=str)
def test_gpu_values_of_another_size_than_keys(shape, size):
    _check(store_kv, _with_unlike_values(_inputs(4, "cuda", shape=shape), size))


@pytest.mark.gpu
def test_gpu_cache_past_two_billion_elements():
    heads, head_dim, block_size = 8, 128, 16
    num_blocks = int(2.4e9) // (heads * head_dim * block_size)
    caches = [
        torch.zeros(num_blocks, block_size, heads, head_dim, dtype=torch.float16, device="cuda") for _ in range(2)
    ]
    key, value = torch.randn(2, 3, heads, head_dim, device="cuda").half()
    slots = torch.tensor([num_blocks * block_size - 1, 0, num_blocks * block_size - 40], device="cuda")
    store_kv(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        assert torch.equal(cache.view(-1, heads, head_dim)[slots], new)
        assert int(cache.any(-1).any(-1).sum()) == 3
