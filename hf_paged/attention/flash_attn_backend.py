"""The backend of installed FlashAttention packages for prompts: an adapter for each of versions 2 and 3.

A package is imported when its adapter is first considered, never with this module. What a package cannot carry
exactly is refused before the call, with a reason; then another package is taken, or Triton. Nothing waits for the
device.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hf_paged.attention.plan_prompts import Prompts
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.device.cuda import compute_capability
from hf_paged.kernels._triton import on_device_of
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata, positively_scaled
from hf_paged.optional import install
from hf_paged.scheduler.prefix_tree import PrefixGroups


class AttentionShape(NamedTuple):
    """What decides, besides the device, whether a package can carry a call."""

    dtype: torch.dtype
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class FlashPackage:
    """How one package is found, what it takes, and how it is called.

    ``layout`` returns the arguments that say which positions a row has, from the page table, [R, pages] int32.
    """

    name: str
    module: str
    function: str
    needs: tuple[str, ...]  # arguments that an older release may lack
    majors: tuple[int, ...]  # major compute capabilities
    layout: Callable[[PagedMetadata, torch.Tensor], dict[str, Any]]
    pages_of_256: bool = False  # the block size has to be a multiple of 256
    extra: str | None = None  # of hf_paged, which brings it
    small_pages: bool = False  # cut larger blocks into pages that the kernel gathers slot by slot


def _layout_2(meta: PagedMetadata, page_table: torch.Tensor) -> dict[str, Any]:
    cu_seqlens_k = torch.nn.functional.pad(meta.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": meta.max_seq_len, "block_table": page_table}


def _layout_3(meta: PagedMetadata, page_table: torch.Tensor) -> dict[str, Any]:
    # One split: the result then does not depend on the rest of the batch.
    return {"cache_seqlens": meta.seq_lens, "page_table": page_table, "num_splits": 1}


# In the order in which they are tried.
PACKAGES = (
    FlashPackage(
        "flash-attn 3", "flash_attn_interface", "flash_attn_with_kvcache",
        ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softcap", "num_splits"),
        (9,), _layout_3, small_pages=True,
    ),
    FlashPackage(
        "flash-attn 2", "flash_attn", "flash_attn_varlen_func", ("softcap", "block_table"),
        (8, 9, 10, 11, 12), _layout_2, pages_of_256=True, extra="flash-attn",
    ),
)


@lru_cache(maxsize=64)
def load(package: FlashPackage) -> tuple[Callable[..., Any] | None, str | None]:
    """Return the package's function, or None and the reason why it is not available."""
    remedy = "" if package.extra is None else f": {install(package.extra)}"
    try:
        function = getattr(importlib.import_module(package.module), package.function, None)
    except ModuleNotFoundError as error:
        return None, f"not installed (no module {error.name!r}){remedy}"
    except Exception as error:  # a binary made for another torch or CUDA fails in many ways
        return None, f"{package.module} cannot be imported ({type(error).__name__}: {error})"
    if function is None:
        return None, f"not installed ({package.module} has no {package.function}){remedy}"
    lacks = [name for name in package.needs if name not in inspect.signature(function).parameters]
    if lacks:
        return None, f"too old ({package.function} does not take {', '.join(lacks)})"
    return function, None


@lru_cache(maxsize=64)
def _major(device: torch.device) -> int | None:
    """Major compute capability; None where none of the packages' kernels, which are NVIDIA's, can run."""
    capability = compute_capability(device) if torch.cuda.is_available() else None
    return None if capability is None else capability[0]


def why_not(package: FlashPackage, device: torch.device, shape: AttentionShape) -> str | None:
    """Return why ``package`` cannot carry out calls of ``shape`` on ``device``, or None."""
    major = _major(device)
    if major is None:
        return f"needs an NVIDIA GPU, not {str(device)!r}"
    if major not in package.majors:
        return f"does not run on compute capability {major}.x"
    if (reason := load(package)[1]) is not None:
        return reason
    if package.pages_of_256 and shape.block_size % 256:
        return f"takes a block_size that is a multiple of 256, not {shape.block_size}"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {shape.dtype}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"takes a head_dim up to 256 that is a multiple of 8, not {shape.head_dim}"
    return None


@lru_cache(maxsize=256)
def choose(device: torch.device, shape: AttentionShape) -> FlashPackage | None:
    """Return the first package that can carry out calls of ``shape``, or None."""
    return next((package for package in PACKAGES if why_not(package, device, shape) is None), None)


def missing(spec: AttentionSpec) -> str | None:
    """Return why no package can run a model's prefill, package by package; None if one can."""
    shape = AttentionShape(spec.dtype, spec.head_dim, spec.block_size)
    reasons = [f"{package.name}: {why_not(package, spec.device, shape)}" for package in PACKAGES]
    return None if choose(spec.device, shape) else "; ".join(reasons)


def flash_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions,
) -> torch.Tensor | None:
    """`paged_attention` by the first package that can carry it, else None.

    With a sliding window the packages may load positions shortly before it and give them weight zero, so those must be
    finite (the reference does not read them).
    """
    # Drop a window that is longer than every row: the kernels for windows are slower.
    if options.window is not None and options.window >= meta.max_seq_len:
        options = replace(options, window=None)
    package = choose(q.device, AttentionShape(q.dtype, q.shape[2], k_cache.shape[1]))
    if package is None or not len(q):
        return None
    return run_package(package, q, k_cache, v_cache, meta, options)


def _cut_pages(page_table: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same memory in pages below the kernels' tile.

    flash-attn 3 loads a page that holds whole tiles of keys by TMA, also what lies past the row's end, where a NaN
    times a weight of zero is NaN. Smaller pages are gathered, and what lies past the end is zero. The smallest tile
    that is a power of two: 64 (head_dim 256 with a window), else 128.
    """
    num_blocks, block_size, heads, head_dim = k_cache.shape
    page = 32 if head_dim > 192 else 64
    if block_size <= page:
        return page_table, k_cache, v_cache
    parts = block_size // page
    part = torch.arange(parts, dtype=torch.int32, device=page_table.device)
    shape = (num_blocks * parts, page, heads, head_dim)
    return (page_table[:, :, None] * parts + part).flatten(1), k_cache.view(shape), v_cache.view(shape)


def run_package(
    package: FlashPackage, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """:func:`flash_prefill` by ``package``, which must be able to carry the call (:func:`why_not`)."""
    function, reason = load(package)
    if function is None:
        raise RuntimeError(f"{package.name}: {reason}")
    q, options = positively_scaled(q, options)
    used = max(1, -(-meta.max_seq_len // k_cache.shape[1]))
    page_table = meta.block_table[:, :used].index_select(0, meta.slots)
    if package.small_pages:
        page_table, k_cache, v_cache = _cut_pages(page_table, k_cache, v_cache)
    # Visible positions before and after a token, itself not counted; -1: all.
    window_size = (-1, -1) if options.window is None else (options.window - 1, 0)
    with on_device_of(q):
        out = function(
            q, k_cache, v_cache, cu_seqlens_q=meta.query_start, max_seqlen_q=meta.max_query_len,
            softmax_scale=options.scale, causal=True, window_size=window_size, softcap=options.softcap or 0.0,
            **package.layout(meta, page_table),
        )
    # Some releases return the log-sum-exp as well.
    out = out[0] if isinstance(out, (tuple, list)) else out
    return out.contiguous()


class FlashBackend(TritonBackend):
    """An installed FlashAttention package for steps with a row of several new tokens.

    Rows of one new token always take the Triton kernel, which reads faster than FlashAttention-3
    and needs no page table a row. What no installed package carries (fp32, sinks, chunks, sizes of
    heads or blocks) goes to Triton as well, call by call.
    """

    name = "flash_attn"
    knows_pool_size = True  # FlashAttention 3 loads pages by descriptors of the whole cache

    def why_not(self, spec: AttentionSpec) -> str | None:
        reasons = missing(spec)
        return reasons and f"expected a package that can be used here; {reasons}"

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, spec: AttentionSpec, share_of_layers: float) -> None:
        """Nothing: where it pays was measured against the Triton kernel."""
        return

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        fits = options.sinks is None and options.chunk is None and k_cache.shape == v_cache.shape
        if meta.max_query_len > 1 and fits:
            result = flash_prefill(q, k_cache, v_cache, meta, options)
            if result is not None:  # the packages do not write to `out`, so that the result has to be copied
                return result if out is None else out.copy_(result)
        return super().run(q, k_cache, v_cache, meta, options, out)


BACKEND = FlashBackend()
