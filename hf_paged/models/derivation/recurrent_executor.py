"""Executor of models with a recurrent state: prompts one by one, decode rows as a batch of one token each."""

from __future__ import annotations

import torch

from hf_paged.errors import Reason
from hf_paged.models.base import KVSpec, StepContext
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.executor import final_states
from hf_paged.models.paged_calls import paged_call, running
from hf_paged.models.tuners import ONE_AT_A_TIME, by_row

ON_A_CPU = "It runs in stock. On a CPU, causal LMs that are proved run natively."
_USUAL_LENGTH = 1 << 15  # of a model without positions


class RecurrentExecutor(DerivedExecutor):
    """Executor whose steps (`runner/recurrent`) are one prompt's next tokens, or one token of each of several rows."""

    has_states = True

    @property
    def whole_prompts(self) -> bool:  # type: ignore[override]
        return self.outline.whole_prompts

    def kv_spec(self) -> KVSpec:
        return super().kv_spec()._replace(states=self.outline.states)

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        meta = step.parts[0][2]
        assert len(step.parts) == 1 and step.ends is None
        # A row that computes all of its tokens begins, whatever its slot holds of an earlier sequence.
        view = step.cache.states.view(meta.slots, is_new=meta.max_query_len == meta.max_seq_len)
        with paged_call(self.attention_configs()), running(step, self.masks()), by_row(self._lora, None):
            hidden = final_states(self.decoder, input_ids, step.positions, view)
        view.store()
        return hidden

    def max_length(self, asked: int | None = None) -> int:
        # The tables of requests have a column for each token.
        return super().max_length(_USUAL_LENGTH if asked is None and not self.outline.calls else asked)

    def why_not_constants(self) -> Reason | None:
        device = self.kv_spec().device
        if device.type != "cpu":
            return Reason("{} keeps a recurrent state, which steps {} do not have yet", self.model_class.__name__,
                          f"on {device.type}", remedy=ON_A_CPU)
        return super().why_not_constants()

    def why_not_adapter(self, name: str) -> Reason | None:
        if (reason := super().why_not_adapter(name)) is not None or not self.look().adapters:
            return reason
        return Reason("rows of their own adapters, which layers of {} do not apply row by row",
                      self.model_class.__name__, remedy=ONE_AT_A_TIME)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        # Layers expand states by each token of a chunk.
        return super().step_bytes(num_tokens, num_rows) + num_rows * self.kv_spec().state_bytes
