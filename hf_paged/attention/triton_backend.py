"""The backend of Triton's kernels, which other backends fall back to."""

from __future__ import annotations

import os

import numpy as np
import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.choose_groups import GroupChoice, choose_groups, group_kernel_of
from hf_paged.attention.plan_decode import plan_items
from hf_paged.attention.plan_prompts import PromptKernel, PromptPlan, Prompts, plan_prompts, prompt_kernel_of
from hf_paged.kernels.attention.decode import decode_cta_slots, paged_attention_decode
from hf_paged.kernels.attention.grouped import paged_attention_grouped, paged_attention_grouped_prefill
from hf_paged.kernels.attention.prefill import paged_attention_prefill
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, GroupedWork, PagedMetadata, PromptWork
from hf_paged.scheduler.prefix_tree import PrefixGroups

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEAD_DIM, _MOST_GROUPED_HEAD_DIM = 512, 256


class TritonBackend(AttentionBackend):
    """The split-KV kernel where every row has one new token, else the tiled one; each has its own for shared prefixes.
    """

    name = "triton"

    def why_not(self, spec: AttentionSpec) -> str | None:
        if spec.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "expected 'auto' or 'torch' for a model on a CPU"
        return None

    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, spec: AttentionSpec) -> np.ndarray:
        cta_slots = decode_cta_slots(len(slots), spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device)
        return plan_items(seq_lens, slots, cta_slots)

    def choose_groups(self, groups: PrefixGroups, num_rows: int, spec: AttentionSpec) -> GroupChoice | None:
        return choose_groups(groups, num_rows, group_kernel_of(spec)) if _may_group(spec) else None

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, spec: AttentionSpec,
                     share_of_layers: float) -> PromptPlan | None:
        if not _may_group(spec):
            return None
        return plan_prompts(groups, prompts, self.prompt_kernel(prompts, spec), share_of_layers)

    def prompt_kernel(self, prompts: Prompts, spec: AttentionSpec) -> PromptKernel:
        """Return the properties of the kernels that read prompts row by row and for several rows."""
        return prompt_kernel_of(spec, prompts.max_query_len, prompts.max_seq_len)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the kernels; raises ValueError for arguments that they do not take, RuntimeError without Triton."""
        if q.dtype not in _DTYPES or max(q.shape[-1], v_cache.shape[-1]) > _MOST_HEAD_DIM:
            raise ValueError(
                f"the triton backend takes fp16, bf16 or fp32 and head_dim up to {_MOST_HEAD_DIM}, got {q.dtype}, "
                f"{q.shape[-1]} and {v_cache.shape[-1]}"
            )
        if meta.max_query_len > 1:
            prefill = paged_attention_grouped_prefill if isinstance(meta.work, PromptWork) else paged_attention_prefill
            return prefill(q, k_cache, v_cache, meta, options, out=out)
        run = paged_attention_grouped if isinstance(meta.work, GroupedWork) else paged_attention_decode
        return run(q, k_cache, v_cache, meta, options, out=out)


def _may_group(spec: AttentionSpec) -> bool:
    """Return whether a plan of groups, which is made for one size of heads and one of groups, fits all calls."""
    return spec.are_calls_alike and spec.head_dim <= _MOST_GROUPED_HEAD_DIM


BACKEND = TritonBackend()
