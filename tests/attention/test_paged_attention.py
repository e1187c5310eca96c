"""The torch backend, the registry and the argument checks of paged attention."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_cases import expected, make_case, random_rows, sdpa, worst_error

from hf_paged.attention.registry import BACKENDS, paged_attention, resolve_backend
from hf_paged.config import ATTENTION_BACKENDS
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec


@pytest.mark.parametrize("seed", range(40))
def test_torch_backend_random(seed):
    r = random.Random(seed)
    kv_heads = r.choice([1, 2, 3])
    case = make_case(
        random_rows(r, r.randint(1, 9), 90, 40),
        seed=seed,
        heads=kv_heads * r.choice([1, 2, 3, 4, 8]),
        kv_heads=kv_heads,
        head_dim=r.choice([32, 64, 80, 96, 128, 256]),
        block_size=r.choice([16, 32, 64, 128, 256]),
        window=r.choice([None, None, 1, 7, 33, 200]),
        softcap=None if seed % 3 == 1 else r.choice([None, 3.0, 50.0]),
        sinks=seed % 3 == 1,
        dtype=r.choice([torch.float32, torch.float64]),
    )
    out = paged_attention(*case[:5])
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    assert worst_error(out, expected(case)) < (1e-12 if out.dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("chunk", [1, 8, 16, 50])
@pytest.mark.parametrize("rows", [[(1, 33), (1, 40), (1, 17), (5, 21), (20, 20)], [(9, 37)], [(1, 32)]])
def test_chunks(rows, chunk):
    """A token sees what it would with a window back to the last multiple of the chunk."""
    case = make_case(rows, seed=5)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, AttentionOptions(0.2, chunk=chunk))
    token = 0
    for row, (new, length) in enumerate(rows):
        for seen in range(length - new + 1, length + 1):
            ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [seen])]
            alone = case.meta._replace(query_start=ints[0], seq_lens=ints[1], slots=case.meta.slots[row : row + 1],
                                       slot_mapping=case.meta.slot_mapping[:1], max_query_len=1)
            options = AttentionOptions(0.2, window=(seen - 1) % chunk + 1)
            one = paged_attention(case.q[token : token + 1], case.k_cache, case.v_cache, alone, options)
            torch.testing.assert_close(out[token : token + 1], one)
            token += 1
    with pytest.raises(ValueError, match=r"chunk=.* beside window=3"):
        paged_attention(*case[:4], AttentionOptions(0.2, chunk=chunk, window=3))


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}, {"sinks": True}])
@pytest.mark.parametrize("rows", [[(1, 33)], [(1, 33), (1, 40), (5, 21)], [(9, 9)]])
def test_values_narrower_than_keys(rows, options):
    """Fewer columns of values give fewer columns of the result."""
    case = make_case(rows, seed=4, **options)
    narrow = case.v_cache[..., :20].contiguous()
    out = paged_attention(case.q, case.k_cache, narrow, case.meta, case.options)
    assert out.is_contiguous()
    assert worst_error(out, expected(case)[..., :20]) < 5e-6


@pytest.mark.parametrize(
    "rows", [[(1, n) for n in range(1, 40)], [(1, 33)] * 5, [(1, 1)], [(16, 16), (33, 64), (1, 65)]]
)
def test_torch_backend_is_as_exact_as_stock(rows):
    case = make_case(rows, seed=3, heads=8, kv_heads=4, head_dim=64)
    out, stock = paged_attention(*case[:5], backend="torch"), sdpa(case)
    assert float((out - stock).norm() / stock.norm()) < 1e-6


@pytest.mark.parametrize("limit", [1, 2000, 10**9])
def test_torch_backend_groups(limit, monkeypatch):
    """However the rows of one new token are cut into groups, each gets its own result at its own place."""
    monkeypatch.setattr("hf_paged.kernels.attention.reference._GROUP_ELEMENTS", limit)
    case = make_case([(1, n) for n in (70, 3, 41, 41, 1, 90, 16, 17)], seed=5)
    assert worst_error(paged_attention(*case[:5]), expected(case)) < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_half(dtype):
    case = make_case([(1, 40), (20, 33), (1, 7), (9, 9)], seed=7, dtype=dtype, softcap=20.0)
    out = paged_attention(*case[:5])
    assert out.dtype == dtype
    assert worst_error(out, expected(case)) < 3e-2


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("rows", [[(9, 9)], [(9, 40), (1, 20), (1, 33)]], ids=str)
def test_a_scale_may_be_negative_or_zero(rows, options, scale):
    """Where torch masks by itself it does so ahead of the scale, and a masked score is inf or NaN."""
    case = make_case(rows, seed=2, **options)
    case = case._replace(options=replace(case.options, scale=scale))
    assert worst_error(paged_attention(*case[:5]), expected(case)) < 5e-6


def test_rows_without_tokens_give_zeros():
    case = make_case([(1, 0), (1, 20), (1, 0)], seed=1)
    out = paged_attention(*case[:5])
    assert worst_error(out, expected(case)) < 5e-6
    assert not out[0].any()
    case = make_case([(1, 0), (3, 0)], seed=1)
    assert not paged_attention(*case[:5]).any()


def test_backends_by_name():
    names = set(ATTENTION_BACKENDS) - {"auto"}
    assert {name: backend.name for name, backend in BACKENDS.items()} == {name: name for name in names}
    assert resolve_backend("auto", torch.device("cpu")).name == "torch"
    assert resolve_backend("auto", torch.device("cuda", 1)).name == "triton"
    assert resolve_backend("triton", torch.device("cpu")).name == "triton"
    with pytest.raises(ValueError, match=r"'flashy'.*auto, triton, .*torch"):
        resolve_backend("flashy", torch.device("cpu"))


def test_a_backend_that_waits_for_the_device_plans_nothing():
    """Only such a one may read lengths on the host, and no CUDA graph holds it."""
    arguments = np.array([300, 5]), np.array([0, 1]), AttentionSpec(4, 2, 32, torch.float32, torch.device("cpu"), 16)
    for backend in BACKENDS.values():
        assert (backend.plan(*arguments) is None) == backend.waits == (backend.name == "torch")


def test_a_result_lands_where_it_is_wanted(monkeypatch):
    """Also that of a package, which makes a tensor of its own."""
    case = make_case([(2, 3)], seed=0)
    monkeypatch.setattr("hf_paged.attention.flash_attn_backend.flash_prefill", lambda q, *_, **__: q * 2)
    for name, right in (("torch", expected(case)), ("flash_attn", case.q * 2)):
        out = torch.empty(case.q.shape)
        assert paged_attention(*case[:5], backend=name, out=out) is out
        assert worst_error(out, right) < 5e-6


def test_flash_leaves_sinks_to_triton(monkeypatch):
    """No package here carries them: it must not be asked."""
    called = []
    monkeypatch.setattr("hf_paged.attention.flash_attn_backend.flash_prefill", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr("hf_paged.attention.triton_backend.paged_attention_prefill",
                        lambda q, k_cache, v_cache, meta, options, out: called.append(options) or q)
    case = make_case([(3, 5)], seed=0, sinks=True)
    paged_attention(*case[:5], backend="flash_attn")
    assert called == [case.options]


def test_bad_arguments():
    case = make_case([(1, 3)], seed=0)
    q, k, v, meta = case[:4]
    for change, message in [
        ({"q": q[0]}, r"\[T, Hq, D\]"),
        ({"q": q[:, :3]}, "multiple"),
        ({"q": q.double()}, "dtype"),
        ({"v_cache": v.double()}, "dtype"),
        ({"q": q.transpose(0, 2).contiguous().transpose(0, 2)}, "contiguous"),
        ({"k_cache": k.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"options": AttentionOptions(1.0, window=0)}, "window"),
        ({"options": AttentionOptions(1.0, softcap=0.0)}, "softcap"),
        ({"options": AttentionOptions(1.0, sinks=torch.zeros(3))}, "sinks"),
        ({"options": AttentionOptions(1.0, sinks=torch.zeros(4, dtype=torch.int64))}, "sinks"),
        ({"options": AttentionOptions(1.0, sinks=torch.zeros(8)[::2])}, "sinks"),
        ({"backend": "nope"}, "nope"),
    ]:
        arguments = {"q": q, "k_cache": k, "v_cache": v, "meta": meta, "options": case.options, **change}
        with pytest.raises(ValueError, match=message):
            paged_attention(**arguments)
    with pytest.raises(ValueError, match="float64"):
        paged_attention(q.double(), k.double(), v.double(), meta, case.options, backend="triton")


@pytest.mark.slow
def test_kernels_import_and_run_without_triton():
    code = (
        f"import sys; sys.modules['triton'] = None; sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "import torch, paged_cases as c\n"
        "from hf_paged.kernels import weights_checksum\n"
        "from hf_paged.kernels.layer import store_kv\n"
        "from hf_paged.attention.registry import paged_attention\n"
        "case = c.make_case([(1, 9), (4, 5)], seed=0)\n"
        "assert c.worst_error(paged_attention(*case[:5]), c.expected(case)) < 1e-5\n"
        "try: paged_attention(*case[:5], backend='triton')\n"
        "except RuntimeError as e: assert 'triton' in str(e)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
