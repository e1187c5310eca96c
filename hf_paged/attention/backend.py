"""The protocol of attention backends: a backend plans a step on the host, and then runs kernels on the device.

A backend is made for no model: it is given the sizes of one, an `AttentionSpec`, with each plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from hf_paged.attention.choose_groups import GroupChoice
from hf_paged.attention.plan_prompts import PromptPlan, Prompts
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata
from hf_paged.scheduler.prefix_tree import PrefixGroups


class AttentionBackend(ABC):
    """Attention of a step's new tokens over the pages.

    Attributes:
        name: the backend's name in a config.
        waits: the backend reads device data on the host, so that no CUDA graph can contain it.
        knows_pool_size: launches depend on the number of blocks, so that CUDA graphs are invalid after the pool grows.
        has_queue: `wants_queue` may return True.
    """

    name: str
    waits = False
    knows_pool_size = False
    has_queue = False

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot run such a model if a config names it, or None."""
        return None

    @abstractmethod
    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, spec: AttentionSpec) -> np.ndarray | None:
        """Return the `DecodeWork.items` of rows of one new token, or None if the backend runs without a plan."""

    def choose_groups(self, groups: PrefixGroups, num_rows: int, spec: AttentionSpec) -> GroupChoice | None:
        """Return the groups whose positions are read once for several rows of one new token, or None."""
        return None

    def plan_prompts(self, groups: PrefixGroups, prompts: Prompts, spec: AttentionSpec,
                     share_of_layers: float) -> PromptPlan | None:
        """Return the plan by which shared positions are read once for several rows of several new tokens, or None.

        ``share_of_layers``: the fraction of layers in which that saves reads.
        """
        return None

    def wants_queue(self, num_new: np.ndarray, seq_lens: np.ndarray, spec: AttentionSpec) -> bool:
        """Return whether programs take the tiles of rows of several new tokens from a `TileQueue`."""
        return False

    def read_once(self, meta: PagedMetadata, spec: AttentionSpec) -> PagedMetadata:
        """Return the layout of an eager step with the data that all its layers would otherwise read again."""
        return meta

    @abstractmethod
    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute :func:`~hf_paged.attention.registry.paged_attention` without checks of the arguments."""
