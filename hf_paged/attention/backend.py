"""What computes the attention of a step: each backend plans on the host, then runs on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from hf_paged.attention.choose_groups import GroupChoice
from hf_paged.attention.plan_prompts import PromptPlan, Prompts
from hf_paged.attention.spec import AttentionSpec
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.scheduler.prefix_groups import PrefixGroups


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

    def why_not(self, spec: AttentionSpec) -> str | None:
        """What a config that names this backend needs for such a model, and lacks; None: nothing."""
        return None

    @abstractmethod
    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, spec: AttentionSpec) -> np.ndarray | None:
        """`DecodeWork.items` of rows of one new token, or None where the backend runs without a plan."""

    def choose_groups(self, groups: PrefixGroups, num_rows: int, spec: AttentionSpec) -> GroupChoice | None:
        """What of rows of one new token is read once for several of them; None: nothing."""
        return None

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, spec: AttentionSpec,
                     share_of_layers: float) -> PromptPlan | None:
        """What of rows of several new tokens is read once for several of them; None: nothing.

        ``share_of_layers``: in how many of all layers that saves anything.
        """
        return None

    def wants_queue(self, num_new: np.ndarray, seq_lens: np.ndarray, spec: AttentionSpec) -> bool:
        """Are programs to take the tiles of rows of several new tokens from a `TileQueue`?"""
        return False

    def read_once(self, meta: PagedMetadata, spec: AttentionSpec) -> PagedMetadata:
        """The layout of an eager step with what all its layers would read of it again."""
        return meta

    @abstractmethod
    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        """As :func:`~hf_paged.attention.paged_attention.paged_attention`, arguments unchecked."""
