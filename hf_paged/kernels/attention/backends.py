"""Who computes the attention of a step: each backend plans on the host, then runs on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from hf_paged.device.cuda import num_multiprocessors
from hf_paged.kernels.attention import flash_backend, hopper_support
from hf_paged.kernels.attention.decode import decode_cta_slots, paged_attention_decode
from hf_paged.kernels.attention.decode_work import plan_items
from hf_paged.kernels.attention.grouped_decode import grouped_kernel_of, paged_attention_grouped
from hf_paged.kernels.attention.grouped_prefill import hopper_rows, paged_attention_grouped_prefill, prompt_kernel_of
from hf_paged.kernels.attention.grouped_work import GroupChoice, choose_groups
from hf_paged.kernels.attention.hopper_support import packed_heads, takes, takes_rows, tile_tokens
from hf_paged.kernels.attention.metadata import AttentionOptions, GroupedWork, PagedMetadata, PromptWork
from hf_paged.kernels.attention.prefill import paged_attention_prefill
from hf_paged.kernels.attention.prompt_work import PromptKernel, PromptPlan, Prompts, plan_prompts
from hf_paged.kernels.attention.reference import paged_attention_reference
from hf_paged.kernels.attention.tile_shares import imbalance
from hf_paged.scheduler.prefix_groups import PrefixGroups

_UNEVEN = 1.15  # times as long as even shares would take: from here on a queue of tiles is faster, see docs/notebook.md
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class AttentionBackend(ABC):
    """Attention of a step's new tokens over the pages.

    Attributes:
        name: what a config calls it.
        waits: reads on the host what lies on the device, so no CUDA graph can hold it.
        knows_pool_size: its launches hold the number of blocks, so no CUDA graph of it outlives the pool's growth.
        has_queue: `wants_queue` may say yes.
    """

    name: str
    waits = False
    knows_pool_size = False
    has_queue = False

    @abstractmethod
    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
             device: torch.device) -> np.ndarray | None:
        """`DecodeWork.items` of rows of one new token, or None where the backend runs without a plan."""

    def choose_groups(self, groups: PrefixGroups, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
                      dtype: torch.dtype, device: torch.device) -> GroupChoice | None:
        """What of rows of one new token is read once for several of them; None: nothing."""
        return None

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, num_heads: int, num_kv_heads: int, head_dim: int,
                     dtype: torch.dtype, device: torch.device, share_of_layers: float) -> PromptPlan | None:
        """What of rows of several new tokens is read once for several of them; None: nothing.

        ``share_of_layers``: in how many of all layers that saves anything.
        """
        return None

    def wants_queue(self, num_new: np.ndarray, seq_lens: np.ndarray, num_heads: int, num_kv_heads: int, head_dim: int,
                    dtype: torch.dtype, device: torch.device) -> bool:
        """Are programs to take the tiles of rows of several new tokens from a `TileQueue`?"""
        return False

    def read_once(self, meta: PagedMetadata, block_size: int, width: int) -> PagedMetadata:
        """The layout of an eager step with what all its layers would read of it again; ``width``: Hkv * D."""
        return meta

    @abstractmethod
    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        """As :func:`~hf_paged.kernels.attention.paged_attention.paged_attention`, arguments unchecked."""


class TorchBackend(AttentionBackend):
    """The reference."""

    name = "torch"
    waits = True

    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
             device: torch.device) -> None:
        return None

    def read_once(self, meta: PagedMetadata, block_size: int, width: int) -> PagedMetadata:
        return meta._replace(host_rows=meta.read_on_host(block_size, width))

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        return paged_attention_reference(q, k_cache, v_cache, meta, options, out=out)


class TritonBackend(AttentionBackend):
    """The split-KV kernel where every row has one new token, else the tiled one; each has its own for shared prefixes.
    """

    name = "triton"

    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
             device: torch.device) -> np.ndarray:
        return plan_items(seq_lens, slots, decode_cta_slots(len(slots), num_kv_heads, head_dim, dtype, device))

    def choose_groups(self, groups: PrefixGroups, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
                      dtype: torch.dtype, device: torch.device) -> GroupChoice | None:
        return choose_groups(groups, num_rows, grouped_kernel_of(num_heads, num_kv_heads, head_dim, dtype, device))

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, num_heads: int, num_kv_heads: int, head_dim: int,
                     dtype: torch.dtype, device: torch.device, share_of_layers: float) -> PromptPlan | None:
        kernel = self.prompt_kernel(prompts, num_heads, num_kv_heads, head_dim, dtype, device)
        return plan_prompts(groups, prompts, kernel, share_of_layers)

    def prompt_kernel(self, prompts: Prompts, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                      device: torch.device) -> PromptKernel:
        """What reads prompts row by row, and for several rows."""
        return prompt_kernel_of(num_heads, num_kv_heads, head_dim, dtype, device, prompts.max_query_len,
                                prompts.max_seq_len)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        """Raises ValueError for what the kernels do not take, RuntimeError where triton is not installed."""
        if q.dtype not in _TRITON_DTYPES or q.shape[2] > 256:
            raise ValueError(
                f"the triton backend takes fp16, bf16 or fp32 and head_dim up to 256, got {q.dtype} and {q.shape[2]}"
            )
        if meta.max_query_len > 1:
            prefill = paged_attention_grouped_prefill if isinstance(meta.work, PromptWork) else paged_attention_prefill
            return prefill(q, k_cache, v_cache, meta, options, out=out)
        run = paged_attention_grouped if isinstance(meta.work, GroupedWork) else paged_attention_decode
        return run(q, k_cache, v_cache, meta, options, out=out)


class HopperBackend(TritonBackend):
    """The kernel for Hopper where rows of new tokens fill its tiles, else the others; see `hopper_support`.

    With ``measured_only`` larger heads than those it was measured to be faster with go to the others as well.
    """

    name = "hopper"
    has_queue = True

    def __init__(self, *, measured_only: bool = False) -> None:
        self.largest_head_dim = hopper_support.MEASURED_HEAD_DIM if measured_only else 256

    def prompt_kernel(self, prompts: Prompts, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                      device: torch.device) -> PromptKernel:
        kernel = super().prompt_kernel(prompts, num_heads, num_kv_heads, head_dim, dtype, device)
        group = num_heads // num_kv_heads
        if not self._takes_rows(dtype, head_dim, prompts.max_query_len, group):
            return kernel
        return kernel._replace(rows=hopper_rows(group, num_kv_heads, device))

    def wants_queue(self, num_new: np.ndarray, seq_lens: np.ndarray, num_heads: int, num_kv_heads: int, head_dim: int,
                    dtype: torch.dtype, device: torch.device) -> bool:
        group = num_heads // num_kv_heads
        if not self._takes_rows(dtype, head_dim, int(num_new.max()), group):
            return False
        bundles = num_heads // packed_heads(group)
        return imbalance(num_new, seq_lens, tile_tokens(group), bundles, num_multiprocessors(device)) > _UNEVEN

    def _takes_rows(self, dtype: torch.dtype, head_dim: int, max_query_len: int, group: int) -> bool:
        return head_dim <= self.largest_head_dim and takes_rows(dtype, head_dim, max_query_len, group)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        is_shared = isinstance(meta.work, PromptWork)
        fits = meta.max_query_len > 1 and not is_shared and q.shape[2] <= self.largest_head_dim
        if fits and takes(q, k_cache, v_cache, meta):
            return _hopper_kernel()(q, k_cache, v_cache, meta, options, out=out)
        return super().run(q, k_cache, v_cache, meta, options, out)


@cache
def _hopper_kernel() -> Callable[..., torch.Tensor]:
    from hf_paged.kernels.attention.hopper_prefill import paged_attention_hopper

    return paged_attention_hopper


class FlashBackend(TritonBackend):
    """An installed FlashAttention package for steps with a row of several new tokens.

    Rows of one new token always take the Triton kernel, which reads faster than FlashAttention-3 (docs/performance.md)
    and needs no page table a row. What no installed package carries (fp32, sinks, a head size, a block size: see
    `flash_backend`) goes to Triton as well, call by call.
    """

    name = "flash_attn"
    knows_pool_size = True  # FlashAttention 3 loads pages by descriptors of the whole cache

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, num_heads: int, num_kv_heads: int, head_dim: int,
                     dtype: torch.dtype, device: torch.device, share_of_layers: float) -> None:
        """Nothing: where it pays was measured against the Triton kernel."""
        return

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        if meta.max_query_len > 1 and options.sinks is None:
            result = flash_backend.flash_prefill(q, k_cache, v_cache, meta, options)
            if result is not None:  # the packages do not write where they are told to
                return result if out is None else out.copy_(result)
        return super().run(q, k_cache, v_cache, meta, options, out)


BACKENDS: dict[str, AttentionBackend] = {
    b.name: b for b in (FlashBackend(), HopperBackend(), TorchBackend(), TritonBackend())
}


def resolve_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend that ``name`` stands for on ``device``.

    ``"auto"`` is torch off CUDA. On CUDA it is hopper where that runs, else triton.

    Raises:
        ValueError: an unknown name; the message lists the accepted ones.
    """
    if name == "auto":
        if device.type != "cuda":
            return BACKENDS["torch"]
        if hopper_support.why_not_on(device) is None:
            return HopperBackend(measured_only=True)
        return BACKENDS["triton"]
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; accepted: {', '.join(('auto', *BACKENDS))}")
    return BACKENDS[name]
