"""The prefill kernel for Hopper: where it runs, what it takes, what it compiles to; on such a GPU, against float64."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from compiled_code import lines_of
from paged_cases import expected, make_case, random_rows, run_poisoned, worst_error

import hf_paged
from hf_paged.attention import hopper_backend, triton_backend
from hf_paged.attention.registry import BACKENDS, resolve_backend
from hf_paged.kernels import hopper as gluon
from hf_paged.kernels.attention.prefill import FULL_TILE, paged_attention_prefill
from hf_paged.kernels.attention.types import TileQueue
from hf_paged.kernels.hopper.prefill_support import BLOCK_M, packed_heads, takes, why_not_of, why_not_on

GPU = torch.device("cuda", 0)
ROWS = [(5, 5), (200, 333), (1, 40)]
CASE = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}


@pytest.fixture
def hopper(monkeypatch):
    """A machine with an H200 and the version of Triton that was tested, as far as the choice of kernels can see."""
    why_not_on.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(gluon.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(gluon.triton, "__version__", "3.6.0")
    yield monkeypatch
    why_not_on.cache_clear()


def test_it_runs_where_it_was_tested(hopper):
    assert why_not_on(GPU) is None
    assert resolve_backend("auto", GPU).name == "hopper"


@pytest.mark.parametrize(("owner", "name", "value", "reason"), [
    (torch.cuda, "get_device_capability", lambda device=None: (10, 0), "does not run on compute capability 10.x"),
    (torch.cuda, "get_device_capability", lambda device=None: (8, 0), "does not run on compute capability 8.x"),
    (gluon.triton, "__version__", "3.60.0", "was tested with triton 3.6, not 3.60.0"),
    (gluon.triton, "__version__", "3.7.1", "was tested with triton 3.6, not 3.7.1"),
    (gluon.triton.knobs.runtime, "interpret", True, "needs an NVIDIA GPU, not 'cuda:0'"),
    (gluon, "triton", None, "needs triton, which is not installed"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_elsewhere_the_plain_kernel_runs(hopper, owner, name, value, reason):
    hopper.setattr(owner, name, value)
    assert why_not_on(GPU) == reason
    assert resolve_backend("auto", GPU).name == "triton"


def test_a_cpu_and_unsuitable_models_are_refused_by_name(trained_model):
    with pytest.raises(ValueError, match=r"attention_backend='hopper': .*; it needs an NVIDIA GPU, not 'cpu'"):
        hf_paged.PagedGenerator(trained_model, attention_backend="hopper", num_blocks=8)
    assert why_not_of(torch.float32, 128, 16) == "takes fp16 and bf16, not torch.float32"
    for head_dim in (32, 60, 84, 264):
        assert str(head_dim) in why_not_of(torch.bfloat16, head_dim, 16)
    for block_size in (8, 48):
        assert str(block_size) in why_not_of(torch.bfloat16, 128, block_size)
    for head_dim in (64, 80, 128, 256):
        assert why_not_of(torch.float16, head_dim, 256) is None


def test_it_takes_rows_that_fill_a_tile():
    """A CUDA graph of prompts is captured with FULL_TILE tokens or more: whatever it serves takes the same kernel."""
    for heads, kv_heads, least in ((8, 8, 128), (8, 2, 32), (14, 2, 128), (12, 2, 64), (64, 1, 8)):
        case = make_case([(3, 3)], seed=0, **{**CASE, "heads": heads, "kv_heads": kv_heads})
        for new, taken in ((least - 1, False), (least, True), (FULL_TILE, True), (5000, True)):
            assert takes(case.q, case.k_cache, case.v_cache, case.meta._replace(max_query_len=new)) is taken
    assert FULL_TILE >= BLOCK_M
    assert [packed_heads(group) for group in (1, 2, 3, 4, 6, 7, 8, 32)] == [1, 2, 1, 4, 2, 1, 8, 16]


def test_it_does_not_take_what_tma_cannot_load():
    case = make_case(ROWS, seed=0, **CASE)
    assert takes(*case[:4])
    memory = torch.empty(case.q.numel() + 1, dtype=case.q.dtype)
    assert not takes(memory[1:].view(case.q.shape), *case[1:4])
    narrow = torch.empty(206, 8 * 128 + 4, dtype=case.q.dtype)[:, : 8 * 128].unflatten(1, (8, 128))
    assert not takes(narrow, *case[1:4])
    single = make_case(ROWS, seed=0, **{**CASE, "dtype": torch.float32})
    assert not takes(*single[:4])


def test_the_backend_sends_each_call_to_the_kernel_that_takes_it(monkeypatch):
    calls = []
    monkeypatch.setattr(hopper_backend, "_hopper_kernel", lambda: lambda *args, out: calls.append("hopper"))
    for name in ("prefill", "decode"):
        monkeypatch.setattr(triton_backend, f"paged_attention_{name}", lambda *args, out, name=name: calls.append(name))
    for rows, kernel in ((ROWS, "hopper"), ([(20, 50)], "prefill"), ([(1, 50)], "decode")):
        BACKENDS["hopper"].run(*make_case(rows, seed=0, **CASE)[:5])
        assert calls.pop() == kernel
    BACKENDS["triton"].run(*make_case(ROWS, seed=0, **CASE)[:5])
    assert calls.pop() == "prefill"


def test_auto_takes_it_for_the_head_sizes_that_were_timed(hopper):
    calls = []
    hopper.setattr(hopper_backend, "_hopper_kernel", lambda: lambda *args, out: calls.append("hopper"))
    hopper.setattr(triton_backend, "paged_attention_prefill", lambda *args, out: calls.append("prefill"))
    for head_dim, kernel in ((64, "hopper"), (128, "hopper"), (256, "prefill")):
        case = make_case(ROWS, seed=0, **{**CASE, "head_dim": head_dim})
        resolve_backend("auto", GPU).run(*case[:5])
        assert calls.pop() == kernel
        BACKENDS["hopper"].run(*case[:5])
        assert calls.pop() == "hopper"


@pytest.mark.slow
def test_the_tensor_cores_run_on_while_others_compute():
    """ptxas waits for every product by itself where it cannot see which registers a product holds, and says so."""
    shapes = [
        {"head_dim": 64, "block_n": 128, "stages": 3}, {"head_dim": 128, "block_n": 128, "stages": 2},
        {"head_dim": 128, "block_n": 128, "stages": 2, "has_window": True, "has_softcap": True, "has_sinks": True},
        {"head_dim": 256, "block_n": 64, "stages": 2},
    ]
    script = Path(__file__).with_name("compile_prefill.py")
    for shape, counts in zip(shapes, lines_of(script, shapes, timeout=240), strict=True):
        waits = 16 if shape.get("has_window") else 12
        assert counts["WARPGROUP.DEPBAR"] == waits < counts["HGMMA"] / 4, shape
        assert counts["UTMALDG"] > 0 and counts["shared"] <= 227 << 10


def here(reason=None):
    if torch.cuda.is_available():
        reason = why_not_on(torch.device("cuda", torch.cuda.current_device()))
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def close(case):
    from hf_paged.kernels.hopper.prefill import paged_attention_hopper

    right = expected(case)
    out = run_poisoned(paged_attention_hopper, case)
    plain = worst_error(run_poisoned(paged_attention_prefill, case), right)
    assert worst_error(out, right) < 1.5 * plain + 1e-3
    return out


# Compiling is what takes the time here: few shapes, several draws of rows for each.
@here()
@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "options"), [
    (64, 2, 4, {"sinks": True}),
    (80, 1, 6, {"window": 100, "block_size": 32, "dtype": torch.float16}),
    (128, 8, 4, {}),
    (128, 2, 7, {"window": 513, "block_size": 256, "sinks": True}),
    (128, 2, 1, {"softcap": 5.0, "window": 1}),
    (192, 1, 32, {"softcap": 30.0}),
    (256, 2, 2, {"window": 64, "block_size": 64, "dtype": torch.float16}),
], ids=str)
def test_gpu_random(head_dim, kv_heads, group, options):
    r = random.Random(head_dim)
    for seed in range(4):
        rows = [*random_rows(r, r.randint(1, 9), 1500, 400), (130, 700), (1, 1)]
        close(make_case(rows, seed=seed, kv_heads=kv_heads, heads=kv_heads * group, head_dim=head_dim, device="cuda",
                        **{"dtype": torch.bfloat16, **options}))


@here()
@pytest.mark.gpu
def test_gpu_many_tiles_give_the_same_bits_every_time():
    """More tiles than programs, of all lengths, so that loads run ahead of results; a race would move some bits."""
    r = random.Random(0)
    case = make_case([(n, n + r.choice([0, 0, 700])) for n in (r.randint(1, 900) for _ in range(40))], seed=2,
                     device="cuda", **CASE)
    first = close(case)
    for _ in range(20):
        assert torch.equal(BACKENDS["hopper"].run(*case[:5]), first)


@here()
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 300}], ids=str)
def test_gpu_a_queue_of_tiles_changes_no_bit_and_is_empty_again(options):
    """With fewer tiles than programs, and with more, one launch after the other."""
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    for rows in ([(40, 70)], [(900, 900), (1, 1), (130, 2000), (65, 65), (700, 704)] * 3):
        case = make_case(rows, seed=5, device="cuda", **CASE)
        case = case._replace(options=replace(case.options, **options))
        dealt, queued = close(case), case._replace(meta=case.meta._replace(work=TileQueue(counters)))
        for _ in range(20):
            assert torch.equal(close(queued), dealt)
            assert counters.tolist() == [0, 0]


@here()
@pytest.mark.gpu
def test_gpu_rows_that_see_nothing_give_zeros():
    case = make_case([(40, 0), (50, 50), (3, 0)], seed=3, device="cuda", **CASE)
    assert not close(case)[:40].any()


@here()
@pytest.mark.gpu
def test_gpu_a_graph_serves_other_rows_and_a_pool_that_has_grown():
    from hf_paged.kernels.hopper.prefill import paged_attention_hopper

    cases = [make_case(rows, seed=i, device="cuda", **CASE)
             for i, rows in enumerate(([(400, 400)], [(100, 1000), (200, 300), (100, 100)]))]
    slots = max(len(case.k_cache) for case in cases)
    k, v = (torch.full((slots, *cases[0].k_cache.shape[1:]), float("nan"), dtype=torch.bfloat16, device="cuda")
            for _ in range(2))
    width = max(case.meta.block_table.shape[1] for case in cases)
    meta = cases[0].meta._replace(
        query_start=torch.zeros(4, dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(3, dtype=torch.int32, device="cuda"),
        block_table=torch.zeros(8, width, dtype=torch.int32, device="cuda"),
        slots=torch.zeros(3, dtype=torch.int32, device="cuda"), max_seq_len=4096,
    )
    q, out = torch.empty_like(cases[0].q), torch.empty(cases[0].q.shape, dtype=torch.bfloat16, device="cuda")
    run = partial(paged_attention_hopper, q, k[:3], v[:3], meta, cases[0].options, out=out)  # a pool of three blocks
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        count, table = len(case.rows), case.meta.block_table
        q.copy_(case.q)
        k[: len(case.k_cache)], v[: len(case.v_cache)] = case.k_cache, case.v_cache
        meta.query_start[: count + 1], meta.query_start[count + 1 :] = case.meta.query_start, len(q)
        meta.seq_lens.zero_()
        meta.seq_lens[:count], meta.slots[:count] = case.meta.seq_lens, case.meta.slots
        meta.block_table[: len(table), : table.shape[1]] = table
        out.fill_(float("nan"))
        graph.replay()
        assert worst_error(out, expected(case)) < 2e-2
