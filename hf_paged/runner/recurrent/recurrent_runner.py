"""Launches of steps of models with a recurrent state: a forward for each prompt, and one for all decode rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_paged.runner.model_runner import Computed, ModelRunner
from hf_paged.runner.recurrent.state_pool import StatePool
from hf_paged.scheduler import StepPlan


class RecurrentRunner(ModelRunner):
    """A `ModelRunner` whose pool has states beside pages. Its steps run eagerly; no step may run twice."""

    def __init__(self, *args: Any, max_num_seqs: int, use_graphs: bool = False, **sizes: Any) -> None:
        super().__init__(*args, max_num_seqs=max_num_seqs, **sizes)
        self.cache.states = StatePool(self.spec, max_num_seqs)

    def _hidden_states(self, plan: StepPlan, *, every_token: bool) -> Computed:
        hidden = []
        for part in forwards_of(plan):
            rows = from_first_token(part) if self.executor.whole_prompts and not part.num_decode_rows else part
            hidden.append(super()._hidden_states(rows, every_token=True).hidden[-part.num_tokens:])
        query_start = np.concatenate([[0], np.cumsum(plan.num_new_tokens)]).astype(np.int32)
        return Computed(torch.cat(hidden), query_start, None)  # rows name no adapters


def from_first_token(plan: StepPlan) -> StepPlan:
    """Return a plan that computes its rows' tokens, and again all that is in front of them."""
    zero = np.zeros_like(plan.start)
    return replace(plan, start=zero, write_from=zero, num_new_tokens=plan.start + plan.num_new_tokens)


def forwards_of(plan: StepPlan) -> Iterator[StepPlan]:
    """Yield a plan of the decode rows, each of which has one new token, and one of each other row, in order."""
    bounds = [0, *range(plan.num_decode_rows, len(plan.slots) + 1)]
    for first, end in pairwise(bounds):
        if first < end:
            rows = slice(first, end)
            columns = {name: getattr(plan, name)[rows] for name in (
                "sequences", "slots", "num_new_tokens", "start", "write_from", "samples", "tenancy")}
            yield replace(plan, **columns, num_decode_rows=end if end <= plan.num_decode_rows else 0)
