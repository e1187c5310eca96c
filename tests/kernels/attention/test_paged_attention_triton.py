"""The Triton attention kernels, in the interpreter and compiled, against attention in float64."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from paged_cases import expected, make_case, random_rows, run_poisoned, sdpa, worst_error

from hf_paged.attention.registry import BACKENDS, paged_attention, resolve_backend
from hf_paged.kernels.attention.decode import DecodeConfig, decode_config, even_work, paged_attention_decode
from hf_paged.kernels.attention.prefill import (
    FULL_TILE,
    SHORT_SEQUENCE,
    PrefillConfig,
    paged_attention_prefill,
    prefill_config,
)

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
HEAD_DIMS = [32, 64, 80, 96, 128, 256]
KEYS_AND_VALUES = [(192, 128), (24, 16), (96, 64), (24, 40), (16, 128), (512, 512)]


def cut(case, splits):
    """The case with every row cut into that many splits."""
    return case._replace(meta=case.meta._replace(work=even_work(case.meta, case.k_cache.shape[2], splits)))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(18))
def test_prefill_random(seed):
    r = random.Random(seed)
    kv_heads = r.choice([1, 2])
    dtype = r.choice([torch.float32, torch.float16])
    case = make_case(
        random_rows(r, r.randint(1, 4), 80, 30),
        seed=seed,
        heads=kv_heads * r.choice([1, 2, 3, 4, 8]),
        kv_heads=kv_heads,
        head_dim=HEAD_DIMS[seed % 6],
        block_size=r.choice([16, 32, 64, 128, 256]),
        window=r.choice([None, None, 1, 5, 33]),
        softcap=None if seed % 3 == 1 else r.choice([None, 3.0, 50.0]),
        sinks=seed % 3 == 1,
        dtype=dtype,
    )
    tiles = r.choice([16, 32]), r.choice([16, 32, 64])
    config = PrefillConfig(*tiles, 4, 1, branch=r.random() < 0.6)
    out = run_poisoned(paged_attention_prefill, case, config=config)
    assert worst_error(out, expected(case)) < TOLERANCE[dtype]


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(18))
def test_decode_random(seed):
    r = random.Random(seed)
    kv_heads = r.choice([1, 2])
    dtype = r.choice([torch.float32, torch.float16])
    case = make_case(
        [(1, r.choice([1, 15, 16, 17, 64, 65, r.randint(1, 300)])) for _ in range(r.randint(1, 3))],
        seed=seed,
        heads=kv_heads * r.choice([1, 2, 3, 4, 8, 20]),
        kv_heads=kv_heads,
        head_dim=HEAD_DIMS[seed % 6],
        block_size=r.choice([16, 32, 64, 128, 256]),
        window=r.choice([None, None, 1, 33, 100, 150]),
        softcap=None if seed % 3 == 1 else r.choice([None, 3.0, 50.0]),
        sinks=seed % 3 == 1,
        dtype=dtype,
    )
    config = DecodeConfig(r.choice([16, 32, 64]), 4, 1, 4)
    out = run_poisoned(paged_attention_decode, cut(case, r.choice([1, 2, 3, 4, 7, 33])), config=config)
    assert worst_error(out, expected(case)) < TOLERANCE[dtype]


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(len(KEYS_AND_VALUES)))
def test_values_of_another_size_than_keys(seed, kind):
    head_dim, value_dim = KEYS_AND_VALUES[seed]
    r = random.Random(seed)
    rows = [(1, n) for n in (130, 1, 65)] if kind == "decode" else random_rows(r, 3, 80, 30)
    case = make_case(
        rows, seed=seed, heads=[2, 6, 8][seed % 3], kv_heads=2, head_dim=head_dim, value_dim=value_dim,
        block_size=[16, 64][seed % 2], window=[None, 33][seed // 2 % 2], chunk=[None, 20][seed // 4],
        softcap=[3.0, None][seed % 2], sinks=seed % 2 == 1, dtype=[torch.float32, torch.float16][seed % 2],
    )
    if kind == "decode":
        outs = [run_poisoned(paged_attention_decode, cut(case, splits)) for splits in (1, 3)]
    else:
        outs = [run_poisoned(paged_attention_prefill, case, config=PrefillConfig(32, 32, 4, 1, branch=seed > 2))]
    for out in outs:
        assert worst_error(out, expected(case)) < TOLERANCE[case.q.dtype]


@pytest.mark.interpreted
@pytest.mark.parametrize("chunk", [1, 20, 32, 64, 500])
def test_chunks(chunk):
    """Rows on, before and behind a chunk's first position; tiles of queries and of positions across several chunks."""
    lengths = (31, 32, 33, 40, 60, 61, 64, 65, 129)
    case = make_case([(1, n) for n in lengths], seed=3, heads=2, kv_heads=1, chunk=chunk)
    for splits in (1, 2):
        assert worst_error(run_poisoned(paged_attention_decode, cut(case, splits)), expected(case)) < 5e-6
    case = make_case([(40, 70), (70, 70), (1, 97), (33, 96), (2, 0)], seed=4, heads=2, kv_heads=1, chunk=chunk)
    for branch in (False, True):
        out = run_poisoned(paged_attention_prefill, case, config=PrefillConfig(32, 32, 4, 1, branch))
        assert worst_error(out, expected(case)) < 5e-6


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [1, 2, 3, 64])
@pytest.mark.parametrize("window", [None, 64, 65])
def test_decode_at_split_boundaries(splits, window):
    """Lengths around multiples of the smallest split (64), where a position could be read twice or not at all."""
    case = make_case([(1, n) for n in (63, 64, 65, 128, 129, 193)], seed=11, heads=2, kv_heads=1, window=window)
    out = run_poisoned(paged_attention_decode, cut(case, splits))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
def test_decode_joins_many_splits():
    case = make_case([(1, 1500), (1, 1100)], seed=12, heads=2, kv_heads=1, block_size=256)
    out = run_poisoned(paged_attention_decode, cut(case, 23))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("seed", range(3))
def test_padding_of_the_head_dim_reads_nothing(head_dim, seed):
    """Past head_dim lies the next slot, which may be NaN."""
    case = make_case([(4, 70)], seed=seed, heads=2, kv_heads=1, head_dim=head_dim)
    out = run_poisoned(paged_attention_prefill, case, config=PrefillConfig(16, 16, 4, 1))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [1, 5])
def test_decode_rows_without_tokens_give_zeros(splits):
    case = make_case([(1, 0), (1, 100), (1, 0)], seed=1)
    out = run_poisoned(paged_attention_decode, cut(case, splits))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]
    assert not out[0].any()


@pytest.mark.interpreted
def test_prefill_rows_without_tokens_give_zeros():
    case = make_case([(3, 0), (2, 20), (1, 0)], seed=1)
    out = run_poisoned(paged_attention_prefill, case, config=PrefillConfig(16, 16, 4, 1))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]
    assert not out[:3].any()
    assert not out[5:].any()


@pytest.mark.interpreted
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (64, None), (16, 40), (64, 40), (32, 16), (16, 17),
                                                    (16, 77)])
def test_prefill_tiles_with_and_without_masks(branch, block_size, window):
    """Tiles of 32 positions and 16 queries over rows long enough for hidden, half and fully visible tiles.

    The window of 77 hides just the first position of a tile, and that from the last query alone.
    """
    case = make_case(
        [(40, 150), (70, 70), (1, 97), (33, 96)], seed=6, heads=2, kv_heads=1, block_size=block_size, window=window
    )
    config = PrefillConfig(32, 32, 4, 1, branch)
    assert worst_error(run_poisoned(paged_attention_prefill, case, config=config), expected(case)) < 5e-6


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prefill_scale_may_be_negative_or_zero(scale, softcap):
    case = make_case([(9, 40), (20, 20)], seed=7, softcap=softcap)
    case = case._replace(options=replace(case.options, scale=scale))
    assert worst_error(run_poisoned(paged_attention_prefill, case), expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
@pytest.mark.parametrize("new", [(7, 8, 9), (16, 1, 1, 1, 17), (8,), (1, 1)])
def test_prefill_finds_every_rows_tiles(new):
    """Rows that end on, before and after a tile's edge; a group of 2 and tiles of 16 rows are 8 queries each."""
    case = make_case([(n, n + 3) for n in new], seed=2)
    out = run_poisoned(paged_attention_prefill, case, config=PrefillConfig(16, 16, 4, 1))
    assert worst_error(out, expected(case)) < TOLERANCE[torch.float32]


@pytest.mark.interpreted
def test_dispatch_by_query_length(monkeypatch):
    called = []
    for name in ("prefill", "decode"):
        monkeypatch.setattr(
            f"hf_paged.attention.triton_backend.paged_attention_{name}",
            lambda *_, _name=name, **__: called.append(_name),
        )
    for rows in ([(1, 4), (1, 9)], [(1, 4), (2, 9)]):
        case = make_case(rows, seed=0)
        paged_attention(*case[:5], backend="triton")
    assert called == ["decode", "prefill"]


@pytest.mark.interpreted
def test_scores_far_apart_do_not_overflow():
    case = make_case([(1, 70), (5, 40)], seed=4)
    case = case._replace(options=replace(case.options, scale=200.0))
    assert worst_error(run_poisoned(paged_attention_prefill, case), expected(case)) < 1e-4


def test_configs_cover_every_head_size():
    for head_dim_pad in (16, 32, 64, 128, 256, 512):
        for itemsize in (2, 4):
            for group in (1, 3, 8, 200):
                for new, long, shared in itertools.product((1, 9, 5000), (0, 9000), (99 << 10, 227 << 10)):
                    config = prefill_config(head_dim_pad, itemsize, group, new, new + long, shared)
                    assert config.block_m >= max(16, group)
                    in_flight = config.block_m + config.num_stages * 2 * config.block_n
                    assert group > 8 or itemsize == 4 or in_flight * head_dim_pad * itemsize <= shared
            for programs, shared in itertools.product((1, 4, 16), (99 << 10, 227 << 10)):
                assert decode_config(head_dim_pad, itemsize, programs, shared).block_n >= 16


def test_a_graph_takes_the_tiles_of_every_prompt_that_it_serves():
    """From a full tile of new tokens on, and up to the longest short sequence, nothing about the rows matters."""
    for head_dim_pad, itemsize, group in itertools.product((16, 64, 128, 256), (2, 4), (1, 3, 8, 200)):
        for shared in (99 << 10, 227 << 10):
            chosen = partial(prefill_config, head_dim_pad, itemsize, group, shared_memory=shared)
            full = chosen(FULL_TILE, SHORT_SEQUENCE)
            assert {chosen(new, SHORT_SEQUENCE) for new in (FULL_TILE + 1, 5000)} == {full}
            assert {chosen(FULL_TILE, length) for length in (1, SHORT_SEQUENCE - 1)} == {full}
    deep = partial(prefill_config, 128, 2, 1, FULL_TILE, shared_memory=227 << 10)
    assert deep(SHORT_SEQUENCE + 1) == deep(9000) != deep(SHORT_SEQUENCE)
    assert deep(SHORT_SEQUENCE).block_m == FULL_TILE


def _bounded(case, out):
    """Error at most twice that of torch's own attention in the same dtype (softcap: a plain tolerance)."""
    right = expected(case)
    error = float((out.double() - right).norm() / right.norm())
    if case.options.softcap is None:
        stock = sdpa(case)
        bound = 2 * float((stock.double() - right).norm() / right.norm()) + 1e-6
    else:
        bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[out.dtype]
    assert worst_error(out, right) < 20 * bound
    assert error <= bound, (error, bound)


def check_kind(kind, case):
    if kind == "prefill":
        out = run_poisoned(paged_attention_prefill, case)
    else:
        out = run_poisoned(paged_attention_decode, cut(case, 1 if kind == "decode" else 7))
    _bounded(case, out)


# Compiling is what takes the time here: few shapes, several draws of rows for each.
GPU_SHAPES = [(d, t) for t in (torch.bfloat16, torch.float16) for d in HEAD_DIMS] + [
    (64, torch.float32),
    (256, torch.float32),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), GPU_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode", "split"])
def test_gpu_random(kind, head_dim, dtype):
    r = random.Random(f"{kind}{head_dim}{dtype}")
    kv_heads, group, block_size = r.choice([1, 2, 8]), r.choice([1, 2, 3, 4, 8]), r.choice([16, 32, 64, 128, 256])
    window, softcap = r.choice([None, None, 100, 513]), r.choice([None, None, 30.0])
    for seed in range(3):
        rows = random_rows(r, r.randint(1, 9), 1500, 400)
        if kind == "prefill":
            rows.append((130, 700))
        else:
            rows = [(1, length) for _, length in rows]
        case = make_case(
            rows,
            seed=seed,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            softcap=softcap,
            sinks=seed == 1,
            dtype=dtype,
            device="cuda",
        )
        check_kind(kind, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), [*KEYS_AND_VALUES, (192, 192)], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode", "split"])
def test_gpu_values_of_another_size_than_keys_and_chunks(kind, head_dim, value_dim):
    r = random.Random(f"{kind}{head_dim}")
    for seed, (dtype, chunk) in enumerate([(torch.bfloat16, None), (torch.float16, 200), (torch.float32, 1000)]):
        rows = random_rows(r, 5, 1500, 400)
        rows = [*rows, (130, 700)] if kind == "prefill" else [(1, length) for _, length in rows]
        case = make_case(
            rows, seed=seed, heads=8, kv_heads=[8, 2, 1][seed], head_dim=head_dim, value_dim=value_dim,
            block_size=[16, 64, 256][seed], chunk=chunk, dtype=dtype, device="cuda",
        )
        check_kind(kind, case)


@pytest.mark.gpu
def test_gpu_auto_backend_agrees_with_torch_backend():
    for rows in ([(1, 300), (1, 1), (1, 77)], [(50, 60), (1, 300), (128, 128)]):
        case = make_case(rows, seed=1, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
        out = paged_attention(*case[:5])
        if resolve_backend("auto", case.q.device).name == "triton":
            assert torch.equal(out, BACKENDS["triton"].run(*case[:5]))
        _bounded(case, out)
        assert worst_error(paged_attention(*case[:5], backend="torch"), expected(case)) < 3e-2


@pytest.mark.gpu
def test_gpu_graph_captured_for_long_rows_serves_short_ones():
    case = make_case(
        [(1, n) for n in (700, 3, 64, 65, 1200)],
        seed=9, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
    )
    lengths = case.meta.seq_lens.clone()
    meta = case.meta._replace(max_seq_len=40960)
    out = torch.empty(case.q.shape, dtype=case.q.dtype, device="cuda")
    paged_attention_decode(*case[:3], meta, case.options, out=out)
    case.meta.seq_lens.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_decode(*case[:3], meta, case.options, out=out)
    case.meta.seq_lens.copy_(lengths)
    out.fill_(float("nan"))
    graph.replay()
    _bounded(case, out)


@pytest.mark.gpu
def test_gpu_no_new_compilation_from_step_to_step():
    from hf_paged.kernels.attention import decode, prefill

    def compiled():
        kernels = (prefill._prefill_kernel, decode._decode_kernel)
        return sum(len(c[0]) for k in kernels for c in k.device_caches.values())

    sizes = []
    for extra in range(4):
        for new in (1, 200):
            rows = [(new, 400 + extra + i) for i in range(2 + extra)]
            case = make_case(rows, seed=extra, head_dim=64, dtype=torch.bfloat16, device="cuda")
            if extra % 2:  # 4 bytes off the alignment of a fresh tensor
                shifted = torch.cat([case.meta.seq_lens[:1], case.meta.seq_lens])[1:]
                case = case._replace(meta=case.meta._replace(seq_lens=shifted))
            paged_attention(*case[:5])
        sizes.append(compiled())
    assert sizes[0] == sizes[-1], sizes


@pytest.mark.gpu
def test_gpu_cache_past_two_billion_elements():
    """The row's blocks lie at the end of caches of 2.4e9 elements."""
    small = make_case(
        [(1, 40), (9, 30)], seed=3, heads=16, kv_heads=8, head_dim=128, dtype=torch.float16, device="cuda"
    )
    num_blocks = int(2.4e9) // (16 * 8 * 128)
    moved = num_blocks - small.k_cache.shape[0]
    caches = []
    for cache in (small.k_cache, small.v_cache):
        big = torch.empty(num_blocks, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        big[moved:] = cache
        caches.append(big)
    meta = small.meta._replace(block_table=small.meta.block_table + moved)
    right = paged_attention(*small[:5])
    assert torch.equal(right, paged_attention(small.q, *caches, meta, small.options))
    one = make_case([(1, 40)], seed=3, heads=16, kv_heads=8, head_dim=128, dtype=torch.float16, device="cuda")
    for cache, source in zip(caches, (one.k_cache, one.v_cache), strict=True):
        cache[num_blocks - source.shape[0] :] = source
    meta = one.meta._replace(block_table=one.meta.block_table + num_blocks - one.k_cache.shape[0])
    assert torch.equal(paged_attention(*one[:5]), paged_attention(one.q, *caches, meta, one.options))
