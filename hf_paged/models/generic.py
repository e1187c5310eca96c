"""Executor of any family of `families.py`: stock modules on packed tokens [1, T], with attention over the pages.

Nothing of the model is replaced: the decoder's own forward runs, and its attention modules find `paged_calls`' function
in their config. So this file need not know what a family computes besides attention, only that it computes each token
by itself, as transformers' own classes do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_paged.models.base import StepContext
from hf_paged.models.decoder import CONFIG_CONSTANTS, DecoderExecutor, plain_values
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.plain_linear import all_columns, apply_head


class GenericExecutor(DecoderExecutor):
    """Executor that runs the decoder of one family as it stands; it merges no weights and fuses no ops."""

    calls_modules = True

    def prepare(self, max_model_len: int) -> None:
        """Do nothing: nothing is kept besides the modules."""

    def refresh(self, checksum: torch.Tensor | None) -> None:
        """Do nothing: nothing is kept besides the modules."""

    def is_current(self) -> bool:
        return True

    def drop_references(self) -> None:
        """Do nothing: nothing is kept besides the modules."""

    def release(self) -> None:
        """Do nothing: nothing is kept besides the modules."""

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        return self.hidden_states_of_modules(input_ids, step)

    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return all_columns(self.model.lm_head, self.shard_logits(hidden_states, adapters))

    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        with self.casting():
            rows = self.adapter_rows(adapters)
            return self._capped(apply_head(self.model.lm_head, hidden_states, F.linear, rows))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self._family.logits == "divided":
            return logits / config.logits_scaling
        cap = config.final_logit_softcapping if self._family.logits == "capped" else None
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def constants(self) -> tuple:
        config = self.config
        modules = [
            type(part.module).__qualname__ if part.is_activation else plain_values(part.module)
            for part in self._parts() if part.is_activation or part.expected is not None
        ]
        capped = self._family.beyond_sdpa, implementation_of(config) == "sdpa"
        return [repr(getattr(config, name, None)) for name in CONFIG_CONSTANTS], capped, modules
