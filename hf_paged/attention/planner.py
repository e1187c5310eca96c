"""The planner of attention: how rows of a step are split, and which shared prefixes are read once, for one backend."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.choose_groups import GroupChoice
from hf_paged.attention.plan_groups import GroupedPlan, plan_groups
from hf_paged.attention.plan_prompts import PromptPlan, Prompts
from hf_paged.attention.spec import AttentionSpec
from hf_paged.kernels.attention.prefill import FULL_TILE, SHORT_SEQUENCE
from hf_paged.kernels.attention.types import TileQueue
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.prefix_groups import PrefixGroups


class AttentionPlanner:
    """The planner of the attention of steps.

    Attributes:
        saved_positions, saved_prompt_positions: positions that grouping saved the last planned decode rows and prompts
            from reading, in one layer without a window.
    """

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, max_model_len: int) -> None:
        self.backend = backend
        self.spec, self._max_model_len = spec, max_model_len
        self.saved_positions = self.saved_prompt_positions = 0
        self._windows: Counter[int | None] = Counter()
        # The choice of the last step with groups; groups are the same object as long as they have not changed.
        self._chosen: tuple[PrefixGroups, int, GroupChoice | None] | None = None

    def arrivals(self, num_rows: int) -> torch.Tensor:
        """Return the counters of `DecodeWork` for ``num_rows`` rows."""
        return torch.zeros(num_rows * self.spec.num_kv_heads, dtype=torch.int32, device=self.spec.device)

    def tile_queue(self) -> TileQueue:
        """Return a new queue."""
        return TileQueue(torch.zeros(2, dtype=torch.int32, device=self.spec.device))

    def may_queue(self) -> bool:
        """Return whether tiles of prompts may be taken from a queue."""
        # Not with windows: the cost of tiles differs from layer to layer, and one decision holds for all layers.
        return self.backend.has_queue and not self._has_windows()

    def wants_queue(self, plan: StepPlan) -> bool:
        """Return whether programs take the tiles of the step's prompts from a queue, if no prefix is shared."""
        if not self.may_queue():
            return False
        rows = slice(plan.num_decode_rows, None)
        num_new = plan.num_new_tokens[rows]
        return self.backend.wants_queue(num_new, plan.start[rows] + num_new, self.spec)

    def split_plan(self, seq_lens: np.ndarray, slots: np.ndarray,
                   groups: PrefixGroups | None = None) -> np.ndarray | GroupedPlan | None:
        """Return the plan of rows of one new token, which may read shared prefixes of groups once for several rows.

        The plan's sizes depend on the number of rows alone. Returns None if the backend runs without a plan.
        """
        self.saved_positions = 0
        if groups is not None and (choice := self._choice(groups, len(slots))) is not None:
            plan = plan_groups(seq_lens, slots, choice, self._share_of_layers(seq_lens))
            if plan is not None:
                self.saved_positions = choice.saved_positions
                return plan
        return self.plain_plan(seq_lens, slots)

    def plan_nothing(self) -> None:
        """Note that each row reads all of its positions, where `split_plan` is not called."""
        self.saved_positions = 0

    def plain_plan(self, seq_lens: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """Return the plan of rows without shared prefixes; does not change `saved_positions`."""
        return self.backend.plan(seq_lens, slots, self.spec)

    def prompt_plan(self, plan: StepPlan, max_query_len: int, max_seq_len: int) -> PromptPlan | None:
        """Return the plan by which prompts' shared prefixes are read for tiles of several rows; None for row by row.

        The lengths are the bounds of `PagedMetadata`.
        """
        self.saved_prompt_positions = 0
        if plan.prompt_groups is None:
            return None
        rows = slice(plan.num_decode_rows, None)
        prompts = Prompts(plan.start[rows], plan.num_new_tokens[rows], plan.slots[rows], max_query_len, max_seq_len)
        share_of_layers = self._share_of_layers(prompts.start + prompts.num_new)
        found = self.backend.plan_prompts(plan.prompt_groups, prompts, self.spec, share_of_layers)
        if found is not None:
            self.saved_prompt_positions = found.saved_positions
        return found

    def captured_prompt_plan(self, plan: StepPlan, num_tokens: int) -> PromptPlan | None:
        """Return the `prompt_plan` of a graph for ``num_tokens`` tokens."""
        if plan.prompt_groups is None:
            self.saved_prompt_positions = 0
            return None
        long = self.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        return self.prompt_plan(plan, *self.captured_bounds(num_tokens, long))

    def use_windows(self, windows: tuple[int | None, ...]) -> None:
        """Set the windows of the layers; None for a layer that sees all positions."""
        self._windows = Counter(windows)

    def _has_windows(self) -> bool:
        return bool(self._windows.keys() - {None})

    def _share_of_layers(self, seq_lens: np.ndarray) -> float:
        """Return the fraction of layers that see all positions of these rows; windows of others exclude prefixes."""
        if not self._has_windows():
            return 1.0
        longest = int(seq_lens.max())
        seeing = sum(count for window, count in self._windows.items() if window is None or longest <= window)
        return seeing / self._windows.total()

    def _choice(self, groups: PrefixGroups, num_rows: int) -> GroupChoice | None:
        chosen = self._chosen
        if chosen is None or chosen[0] is not groups or chosen[1] != num_rows:
            chosen = self._chosen = groups, num_rows, self.backend.choose_groups(groups, num_rows, self.spec)
        return chosen[2]

    def captured_bounds(self, num_tokens: int, long: bool) -> tuple[int, int]:
        """Return the most new tokens and the most tokens of a row in a graph's steps."""
        # Tiles for full rows: a row of a replay may have any number of the graph's tokens.
        return max(FULL_TILE, num_tokens), self._max_model_len if long else SHORT_SEQUENCE

    @staticmethod
    def is_long(seq_lens: np.ndarray) -> bool:
        """Return whether these prompts need a graph with the tiles of long sequences."""
        return int(seq_lens.max()) > SHORT_SEQUENCE
