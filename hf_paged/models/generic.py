"""Any family of `families.py`: its stock modules on packed tokens [1, T], with attention over the pages.

Nothing of the model is replaced: the decoder's own forward runs, and its attention modules find `paged_calls`' function
in their config. So what a family computes besides attention need not be known here, only that it looks at each token
alone, which is so for transformers' own classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_paged.models.base import StepContext
from hf_paged.models.decoder import CONFIG_CONSTANTS, DecoderExecutor, plain_values
from hf_paged.models.lora_rows import by_row
from hf_paged.models.paged_calls import STEP_ARGUMENT, WindowedStep, implementation_of, paged_call
from hf_paged.models.plain_linear import all_columns, apply_head


class GenericExecutor(DecoderExecutor):
    """Runs the decoder of one family as it stands; there are no weights to merge and no ops to fuse."""

    calls_modules = True

    def prepare(self, max_model_len: int) -> None:
        """Nothing is kept besides the modules."""

    def is_current(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing is kept besides the modules."""

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        decoder = self.decoder
        # A mask of four dims is passed on as it is: no mask is made, and nothing is looked up in the positions.
        no_mask = input_ids.new_empty((1, 1, 1, 1), dtype=torch.bool)
        windows = tuple(map(self._mask_window, range(len(self._layers()))))
        with paged_call(self._configs()), by_row(self._lora, self.adapter_rows(step.adapters)):
            output = decoder(
                input_ids=input_ids[None], attention_mask=no_mask, position_ids=step.positions[None], use_cache=False,
                output_attentions=False, output_hidden_states=False, output_router_logits=False, return_dict=True,
                **{STEP_ARGUMENT: WindowedStep(step, windows)},
            )
        result: torch.Tensor = output.last_hidden_state[0]
        return result

    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return all_columns(self.model.lm_head, self.shard_logits(hidden_states, adapters))

    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        logits = apply_head(self.model.lm_head, hidden_states, F.linear, self.adapter_rows(adapters))
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

    def _configs(self) -> list[Any]:
        """Every config that the decoder or an attention module looks into, each once."""
        modules = (self.decoder, *(layer.self_attn for layer in self._layers()))
        return list({id(module.config): module.config for module in modules}.values())
