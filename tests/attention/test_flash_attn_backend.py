"""The flash_attn backend: argument mapping against stand-ins for the packages, selection, and real packages."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from types import ModuleType

import pytest
import torch
from paged_cases import Case, expected, make_case, worst_error

import hf_paged
from hf_paged.attention import flash_attn_backend as fb
from hf_paged.attention.registry import BACKENDS, paged_attention, resolve_backend
from hf_paged.kernels.attention.reference import paged_attention_reference
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata

CPU = torch.device("cpu")
SPEC = AttentionSpec(16, 8, 128, torch.bfloat16, CPU, 16)
FLASH_3, FLASH_2 = fb.PACKAGES
BLOCK_SIZE = {FLASH_2.name: 256, FLASH_3.name: 16}


def attend(q, k_cache, v_cache, starts, lengths, page_table, scale, causal, window, softcap):
    """What the packages compute, from their arguments alone; a window of -1 is open on that side."""
    assert scale > 0, "they multiply masked scores by it"
    assert causal and all(x.dtype == torch.int32 for x in (starts, lengths, page_table))
    assert page_table.shape[0] == len(lengths) and page_table.is_contiguous()
    left, right = window
    assert right in (-1, 0) and (right == 0) == (left != -1)
    meta = PagedMetadata(starts, lengths, page_table, torch.arange(len(lengths)), None, 0, 0)
    options = AttentionOptions(scale, window=None if left == -1 else left + 1, softcap=softcap or None)
    return paged_attention_reference(q, k_cache, v_cache, meta, options)


def fake_2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
           return_attn_probs=False, block_table=None):
    assert dropout_p == 0.0 and k.shape[1] % 256 == 0 and cu_seqlens_k[0] == 0
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k >= lengths.max()
    return attend(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, causal, window_size, softcap)


def fake_3(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
           cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
           max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
           causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
           scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False):
    assert k is None and v is None and cu_seqlens_k_new is None and num_splits == 1
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal, window_size,
                  softcap)


FAKES = {FLASH_2.name: fake_2, FLASH_3.name: fake_3}


def forget():
    """Selection is remembered for the life of a process; a test changes what is installed."""
    for cached in (fb.load, fb.choose):
        cached.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """A CPU that passes for a GPU of a given compute capability, with only the packages that a test installs."""
    calls = []

    class Machine:
        def __init__(self) -> None:
            self.calls = calls
            self.capability(9)
            for name in ("flash_attn", "flash_attn_interface"):
                monkeypatch.setitem(sys.modules, name, None)

        def capability(self, major: int | None) -> None:
            monkeypatch.setattr(fb, "_major", lambda device: major)
            forget()

        def install(self, *adapters: fb.FlashPackage, function=None) -> None:
            for adapter in adapters:
                self._install(adapter, function or FAKES[adapter.name])

        def _install(self, adapter, function):
            def recording(*args, **kwargs):
                calls.append(adapter.name)
                return function(*args, **kwargs)

            recording.__wrapped__ = function  # inspect.signature looks through
            module = ModuleType(adapter.module)
            setattr(module, adapter.function, recording)
            monkeypatch.setitem(sys.modules, adapter.module, module)
            forget()

    yield Machine()
    monkeypatch.undo()
    forget()


def half_case(rows=((5, 5), (1, 40), (17, 300), (3, 64)), *, block_size=16, head_dim=32, seed=0, **options) -> Case:
    case = make_case(list(rows), seed=seed, heads=4, kv_heads=2, head_dim=head_dim, block_size=block_size,
                     dtype=torch.float16, **options)
    if case.options.window is not None:
        # Positions before the window must be finite (and have a block) here.
        for cache in case.k_cache, case.v_cache:
            cache.nan_to_num_(0.0)
    return case


LEFT_TO_TRITON = {"sinks": torch.zeros(4), "chunk": 8}


def test_every_option_is_handed_to_the_packages_or_left_to_triton():
    """One that is neither would be dropped in silence where a package is installed."""
    assert {field.name for field in fields(AttentionOptions)} == {"scale", "window", "softcap", *LEFT_TO_TRITON}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", LEFT_TO_TRITON)
def test_an_option_that_no_package_carries_goes_to_triton(machine, name):
    machine.install(*fb.PACKAGES)
    case = half_case(((5, 5), (17, 40)))
    case = case._replace(options=replace(case.options, **{name: LEFT_TO_TRITON[name]}))
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == []
    assert worst_error(out, expected(case)) < 3e-3


@pytest.mark.interpreted
def test_values_of_another_size_than_keys_go_to_triton(machine):
    machine.install(*fb.PACKAGES)
    case = half_case(((5, 5), (17, 40)))
    case = case._replace(v_cache=case.v_cache[..., :8].contiguous())
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == []
    assert worst_error(out, expected(case)) < 3e-3


@pytest.mark.parametrize("adapter", fb.PACKAGES, ids=lambda a: a.name)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (1, None), (None, 3.0), (33, 20.0)])
def test_arguments_say_what_the_reference_computes(machine, adapter, window, softcap):
    machine.install(adapter)
    case = half_case(block_size=BLOCK_SIZE[adapter.name], window=window, softcap=softcap)
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == [adapter.name]
    assert out.is_contiguous() and out.dtype == case.q.dtype
    assert worst_error(out, expected(case)) < 4e-3


@pytest.mark.parametrize("adapter", fb.PACKAGES, ids=lambda a: a.name)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_may_be_negative_or_zero(machine, adapter, scale):
    machine.install(adapter)
    case = half_case(block_size=BLOCK_SIZE[adapter.name])
    case = case._replace(options=replace(case.options, scale=scale))
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == [adapter.name]
    assert worst_error(out, expected(case)) < 4e-3


@pytest.mark.parametrize("adapter", fb.PACKAGES, ids=lambda a: a.name)
def test_rows_without_tokens_and_long_tables(machine, adapter):
    machine.install(adapter)
    case = half_case([(3, 0), (2, 20), (1, 0)], block_size=BLOCK_SIZE[adapter.name])
    wide = torch.nn.functional.pad(case.meta.block_table, (0, 50), value=10**6)  # undefined past a row's end
    case = case._replace(meta=case.meta._replace(block_table=wide))
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == [adapter.name]
    assert worst_error(out, expected(case)) < 4e-3


def test_a_window_that_reaches_everything_is_none(machine):
    seen = {}

    def spy(*args, **kwargs):
        seen.update(kwargs)
        return fake_3(*args, **kwargs)

    spy.__wrapped__ = fake_3
    machine.install(FLASH_3, function=spy)
    case = half_case()
    longest = case.meta.max_seq_len
    for window, passed in ((longest, (-1, -1)), (longest - 1, (longest - 2, 0))):
        options = replace(case.options, window=window)
        paged_attention(*case[:4], options, backend="flash_attn")
        assert seen["window_size"] == passed


@pytest.mark.parametrize(("head_dim", "page"), [(32, 64), (256, 32)])
def test_large_blocks_are_cut_into_pages_that_are_gathered(machine, head_dim, page):
    pages = []

    def spy(q, k, v, *args, **kwargs):
        pages.append((k.shape[1], v.shape[1]))
        return fake_3(q, k, v, *args, **kwargs)

    spy.__wrapped__ = fake_3
    machine.install(FLASH_3, function=spy)
    for block_size in (16, page, 2 * page, 256):
        case = half_case(block_size=block_size, head_dim=head_dim)
        assert worst_error(paged_attention(*case[:5], backend="flash_attn"), expected(case)) < 4e-3
    assert pages == [(16, 16)] + [(page, page)] * 3


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"head_dim": 20}, ((5, 5), (4, 40))),
        ({}, ((1, 5), (1, 40))),  # decode
    ],
)
def test_what_the_package_does_not_take_goes_to_triton(machine, change, rows):
    machine.install(FLASH_3)
    case = half_case(rows, **{"block_size": 16, **change})
    out = paged_attention(*case[:5], backend="flash_attn")
    assert machine.calls == []
    assert worst_error(out, expected(case)) < 4e-3


@pytest.mark.interpreted
def test_fp32_goes_to_triton(machine):
    machine.install(FLASH_2, FLASH_3)
    case = make_case([(5, 9)], seed=0, block_size=256)
    assert worst_error(paged_attention(*case[:5], backend="flash_attn"), expected(case)) < 5e-6
    assert machine.calls == []


def shape(dtype=torch.bfloat16, head_dim=128, block_size=16):
    return fb.AttentionShape(dtype, head_dim, block_size)


@pytest.mark.parametrize(
    ("adapter", "major", "asked", "reason"),
    [
        (FLASH_2, 8, shape(block_size=256), None),
        (FLASH_2, 9, shape(block_size=512, head_dim=256), None),
        (FLASH_2, 9, shape(block_size=16), "multiple of 256, not 16"),
        (FLASH_2, 7, shape(block_size=256), "compute capability 7"),
        (FLASH_2, 9, shape(torch.float32, block_size=256), "float32"),
        (FLASH_3, 9, shape(), None),
        (FLASH_3, 9, shape(head_dim=72), None),
        (FLASH_3, 9, shape(head_dim=36), "multiple of 8, not 36"),
        (FLASH_3, 9, shape(head_dim=264), "up to 256.*not 264"),
        (FLASH_3, 9, shape(block_size=256), None),
        (FLASH_3, 10, shape(), "compute capability 10"),
        (FLASH_3, None, shape(), "needs an NVIDIA GPU"),
    ],
)
def test_reasons(machine, adapter, major, asked, reason):
    machine.install(FLASH_2, FLASH_3)
    machine.capability(major)
    why = fb.why_not(adapter, CPU, asked)
    if reason is None:
        assert why is None
    else:
        assert why is not None

        assert re.search(reason, why), why


def test_packages_that_are_missing_broken_or_old(machine, monkeypatch):
    assert "no module" in fb.load(FLASH_3)[1]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    forget()
    assert "flash_attn has no flash_attn_varlen_func" in fb.load(FLASH_2)[1]
    machine.install(FLASH_2, function=lambda q, k, v, cu_seqlens_q: q)
    assert "too old" in fb.load(FLASH_2)[1] and "softcap, block_table" in fb.load(FLASH_2)[1]

    def broken(name):
        raise OSError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(fb.importlib, "import_module", broken)
    forget()
    assert "cannot be imported (OSError: undefined symbol" in fb.load(FLASH_3)[1]


def test_order(machine):
    machine.install(FLASH_2, FLASH_3)
    for major, block_size, name in ((9, 16, FLASH_3.name), (9, 256, FLASH_3.name), (8, 256, FLASH_2.name)):
        machine.capability(major)
        assert fb.choose(CPU, shape(block_size=block_size)).name == name
    machine.capability(8)
    assert fb.choose(CPU, shape()) is None


def test_auto_takes_and_imports_no_package(machine):
    machine.install(FLASH_3)
    assert resolve_backend("auto", torch.device("cuda", 0)).name == "triton"
    assert fb.load.cache_info().currsize == 0


def test_nothing_usable_is_an_error_at_construction(trained_model):
    with pytest.raises(ValueError, match=r"attention_backend='flash_attn'.*flash-attn 3: .*2: needs"):
        hf_paged.PagedGenerator(trained_model, attention_backend="flash_attn", num_blocks=8)
    assert hf_paged.PagedConfig(attention_backend="flash_attn").attention_backend == "flash_attn"


def test_missing_names_every_package(machine):
    assert fb.missing(SPEC).count("not installed") == 2
    machine.install(FLASH_2)
    assert "flash-attn 2: takes a block_size" in fb.missing(SPEC)
    assert fb.missing(SPEC._replace(block_size=256)) is None


def gpu_adapter(adapter: fb.FlashPackage) -> fb.FlashPackage:
    asked = shape(block_size=BLOCK_SIZE[adapter.name])
    reason = fb.why_not(adapter, torch.device("cuda", torch.cuda.current_device()), asked)
    if reason is not None:
        pytest.skip(f"{adapter.name}: {reason}")
    return adapter


@pytest.fixture(params=fb.PACKAGES, ids=lambda a: a.name)
def real(request) -> fb.FlashPackage:
    """An adapter whose package is really there."""
    return gpu_adapter(request.param)


GPU_ROWS = [(5, 5), (1, 40), (300, 1100), (129, 129), (7, 260), (64, 64), (2, 513)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (3, 1, 64), (4, 4, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0)])
def test_gpu_package_agrees(real, heads, kv_heads, head_dim, window, softcap, dtype):
    """Poisoned like the Triton tests: NaN in every slot that no token sees (with a window: only past a row's end)."""
    case = make_case(GPU_ROWS, seed=3, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device="cuda",
                     block_size=BLOCK_SIZE[real.name], softcap=softcap)
    case = case._replace(options=replace(case.options, window=window))
    out = fb.run_package(real, *case[:5])
    right = expected(case)
    triton = paged_attention(*case[:5], backend="triton")
    error = float((out.double() - right).norm() / right.norm())
    bound = 1.5 * float((triton.double() - right).norm() / right.norm()) + 1e-6
    assert out.is_contiguous() and worst_error(out, right) < 20 * bound
    assert error <= bound, (error, bound)


@pytest.mark.gpu
def test_gpu_package_rows_without_tokens_give_zeros(real):
    case = make_case([(3, 0), (2, 20), (1, 0)], seed=1, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                     block_size=BLOCK_SIZE[real.name], device="cuda")
    assert worst_error(fb.run_package(real, *case[:5]), expected(case)) < 2e-2


@pytest.mark.gpu
def test_gpu_package_keeps_no_nan_of_an_earlier_call(real):
    """A call over NaN leaves them in shared memory; tiles that a short row fills in part must not pick them up."""
    case = make_case([(3, n) for n in range(3, 131)], seed=1, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                     block_size=BLOCK_SIZE[real.name], device="cuda")
    nan = torch.full_like(case.k_cache, float("nan"))
    for _ in range(3):
        assert fb.run_package(real, case.q, nan, nan, case.meta, case.options).isnan().all()
        assert worst_error(fb.run_package(real, *case[:5]), expected(case)) < 3e-2


@pytest.mark.gpu
def test_gpu_backend_agrees_on_mixed_sizes(real):
    """Through the backend, whatever the shape: what no package takes goes to Triton."""
    for head_dim, block_size, dtype in ((128, 16, torch.bfloat16), (72, 16, torch.float16), (128, 128, torch.bfloat16),
                                        (64, 256, torch.bfloat16), (64, 16, torch.float32)):
        case = make_case(GPU_ROWS, seed=5, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype, device="cuda",
                         block_size=block_size)
        assert worst_error(BACKENDS["flash_attn"].run(*case[:5]), expected(case)) < 3e-2
