"""The torch backend, the registry and the argument checks of paged attention."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_cases import expected, make_case, random_rows, sdpa, worst_error

from hf_paged.kernels.attention.paged_attention import (
    attention_backends,
    paged_attention,
    register_backend,
    resolve_backend,
)


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
    out = paged_attention(*case[:4], **case.options)
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    assert worst_error(out, expected(case)) < (1e-12 if out.dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize(
    "rows", [[(1, n) for n in range(1, 40)], [(1, 33)] * 5, [(1, 1)], [(16, 16), (33, 64), (1, 65)]]
)
def test_torch_backend_is_as_exact_as_stock(rows):
    case = make_case(rows, seed=3, heads=8, kv_heads=4, head_dim=64)
    out, stock = paged_attention(*case[:4], **case.options, backend="torch"), sdpa(case)
    assert float((out - stock).norm() / stock.norm()) < 1e-6


@pytest.mark.parametrize("limit", [1, 2000, 10**9])
def test_torch_backend_groups(limit, monkeypatch):
    """However the rows of one new token are cut into groups, each gets its own result at its own place."""
    monkeypatch.setattr("hf_paged.kernels.attention.paged_attention._GROUP_ELEMENTS", limit)
    case = make_case([(1, n) for n in (70, 3, 41, 41, 1, 90, 16, 17)], seed=5)
    assert worst_error(paged_attention(*case[:4], **case.options), expected(case)) < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_half(dtype):
    case = make_case([(1, 40), (20, 33), (1, 7), (9, 9)], seed=7, dtype=dtype, softcap=20.0)
    out = paged_attention(*case[:4], **case.options)
    assert out.dtype == dtype
    assert worst_error(out, expected(case)) < 3e-2


def test_rows_without_tokens_give_zeros():
    case = make_case([(1, 0), (1, 20), (1, 0)], seed=1)
    out = paged_attention(*case[:4], **case.options)
    assert worst_error(out, expected(case)) < 5e-6
    assert not out[0].any()
    case = make_case([(1, 0), (3, 0)], seed=1)
    assert not paged_attention(*case[:4], **case.options).any()


def test_registry():
    assert {"torch", "triton"} <= set(attention_backends())
    assert resolve_backend("auto", torch.device("cpu")) == "torch"
    assert resolve_backend("auto", torch.device("cuda", 1)) == "triton"
    assert resolve_backend("triton", torch.device("cpu")) == "triton"
    with pytest.raises(ValueError, match=r"'flashy'.*auto, .*torch, triton"):
        resolve_backend("flashy", torch.device("cpu"))
    with pytest.raises(ValueError, match="auto"):
        register_backend("auto", lambda *args, **kwargs: args[0])


def test_a_registered_backend_is_called(monkeypatch):
    monkeypatch.setattr("hf_paged.kernels.attention.paged_attention._BACKENDS", {})
    seen = {}

    def double(q, k_cache, v_cache, meta, **options):
        seen.update(options)
        return q * 2

    register_backend("double", double)
    case = make_case([(1, 3)], seed=0, window=4)
    assert torch.equal(paged_attention(*case[:4], **case.options, backend="double"), case.q * 2)
    assert seen == {**case.options, "out": None}
    out = torch.empty(case.q.shape)
    assert paged_attention(*case[:4], **case.options, backend="double", out=out) is out
    assert torch.equal(out, case.q * 2)


def test_sinks_reach_a_backend_only_where_there_are_some(monkeypatch):
    """A backend written before sinks serves calls without; with them it fails instead of leaving them out."""
    monkeypatch.setattr("hf_paged.kernels.attention.paged_attention._BACKENDS", {})

    def old(q, k_cache, v_cache, meta, *, scale, sliding_window, softcap, out):
        return q

    register_backend("old", old)
    case = make_case([(1, 3)], seed=0)
    assert paged_attention(*case[:4], **case.options, backend="old") is case.q
    with pytest.raises(TypeError, match="sinks"):
        paged_attention(*case[:4], **case.options, sinks=torch.zeros(4), backend="old")


def test_flash_leaves_sinks_to_triton(monkeypatch):
    """No package here carries them: its adapter must not be asked."""
    called = {}
    monkeypatch.setattr("hf_paged.kernels.attention.flash_backend.flash_prefill", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr("hf_paged.kernels.attention.paged_attention.paged_attention_triton",
                        lambda q, *args, **options: called.update(options) or q)  # fmt: skip
    case = make_case([(3, 5)], seed=0, sinks=True)
    paged_attention(*case[:4], **case.options, backend="flash_attn")
    assert called["sinks"] is case.options["sinks"]


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
        ({"sliding_window": 0}, "sliding_window"),
        ({"softcap": 0.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks"),
        ({"sinks": torch.zeros(8)[::2]}, "sinks"),
        ({"backend": "nope"}, "nope"),
    ]:
        arguments = {"q": q, "k_cache": k, "v_cache": v, "meta": meta, **case.options, **change}
        with pytest.raises(ValueError, match=message):
            paged_attention(**arguments)
    with pytest.raises(ValueError, match="float64"):
        paged_attention(q.double(), k.double(), v.double(), meta, **case.options, backend="triton")


def test_kernels_import_and_run_without_triton():
    code = (
        f"import sys; sys.modules['triton'] = None; sys.path.append({str(Path(__file__).parent)!r})\n"
        "import torch, paged_cases as c\n"
        "from hf_paged.kernels import store_kv, weights_checksum\n"
        "from hf_paged.kernels.attention.paged_attention import paged_attention\n"
        "case = c.make_case([(1, 9), (4, 5)], seed=0)\n"
        "assert c.worst_error(paged_attention(*case[:4], **case.options), c.expected(case)) < 1e-5\n"
        "try: paged_attention(*case[:4], **case.options, backend='triton')\n"
        "except RuntimeError as e: assert 'triton' in str(e)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
