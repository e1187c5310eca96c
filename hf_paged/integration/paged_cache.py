"""Cache object for stock's decoding loops while the engine computes their forwards."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.integration.cache_name import CACHE_NAME


class PagedCache(Cache):
    """Cache of a `LockstepBatch`'s rows; keys and values stay in the engine's pages until `to_dynamic`.

    Calling an enabled model with this cache calls `forward`; it has no other use as a cache.

    Args:
        batch: The rows.
        width: Length of the padded prompts in tokens.
        num_layers: Layers of the model.
    """

    def __init__(self, batch: LockstepBatch, width: int, num_layers: int) -> None:
        super().__init__(layers=[])
        self._batch = batch
        self._width = width
        self._num_layers = num_layers
        self._length = 0

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0) -> CausalLMOutputWithPast:
        """Return logits [rows, kept, vocab_size] of the last `logits_to_keep` of ``input_ids`` [rows, new]; 0 keeps
        all.

        The first call has the padded prompts, and possibly tokens after them.
        """
        if self._length == 0:
            logits = self._batch.prompts()[:, None]
            if input_ids.shape[1] > self._width:
                logits = torch.cat([logits, self._batch.decode(input_ids[:, self._width :])], dim=1)
        else:
            logits = self._batch.decode(input_ids)
        self._length += input_ids.shape[1]
        if logits_to_keep > logits.shape[1]:
            raise ValueError(f"logits_to_keep={logits_to_keep}: expected at most {logits.shape[1]} in a paged forward")
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], **{CACHE_NAME: self})  # type: ignore[arg-type]

    def to_dynamic(self, config: PreTrainedConfig) -> DynamicCache:
        """Return the content of stock's cache, with zeros under the left padding, which every mask hides."""
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        for layer, (keys, values) in enumerate(self._batch.keys_and_values(self._length)):
            cache.update(keys, values, layer)
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._batch.reorder(beam_idx.tolist())

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove the last tokens, like stock's `crop`: takes a negative number, or 0."""
        tokens_to_remove = int(tokens_to_remove)  # a tensor on the device in transformers 5.17
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove}: expected a negative number or 0")
        if tokens_to_remove:
            self._batch.crop(-tokens_to_remove)
            self._length += tokens_to_remove

    def activate_past_recording(self) -> None:
        """Do nothing: pages keep every position."""

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_initialized(self) -> bool:
        return self._length > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._num_layers

    def __len__(self) -> int:
        return self._num_layers

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this cache belongs to a generate call of hf_paged; was the model disabled during the call?")
