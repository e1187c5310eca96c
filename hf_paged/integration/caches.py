"""Caches of transformers that hold no tensors: one for stock's loops in lockstep, one for results of native calls."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.engine.engine import Engine
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.integration.adapters import rows_under
from hf_paged.process_lock import ProcessLock

# transformers 5.24 uses the shorter name; it accepts the longer one from callers, with a warning.
_fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
CACHE_NAME = "cache" if "cache" in _fields else "past_key_values"


class PagedCache(Cache):
    """Cache of a `LockstepBatch`'s rows; keys and values stay in the engine's pages until `to_dynamic`.

    Calling an enabled model with this cache calls `forward`; it has no other use as a cache. The padded prompts have
    `width` tokens.
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


def autocast_of_thread(device: torch.device) -> dict[str, Any]:
    """Return the arguments of the `torch.autocast` that is in force in this thread."""
    return {"device_type": device.type, "enabled": torch.is_autocast_enabled(device.type),
            "dtype": torch.get_autocast_dtype(device.type)}


TOKENS_AT_ONCE = 8192  # new tokens of all rows in one forward


class _Call:
    """Inputs to recompute the keys and values of a call; keeps neither model nor engine alive."""

    def __init__(self, engine: Engine, model: Any, sequences: torch.Tensor, width: int,
                 model_kwargs: dict[str, Any], adapters: list[str | None]) -> None:
        self.computing = ProcessLock()
        self._model = weakref.ref(model)
        self._mark = engine.model_mark()
        self._autocast = autocast_of_thread(model.device)
        self._width, self._adapters = width, adapters
        self._tokens = sequences[:, :-1].clone()  # without the last token, which no forward has computed
        more = self._tokens.shape[1] - width
        self._mask, self._positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), more)], dim=1)
        if self._positions is not None:
            steps = torch.arange(1, more + 1, dtype=self._positions.dtype, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + steps], dim=-1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self) -> DynamicCache:
        """Compute stock's cache at the end of the call; raises RuntimeError if the model would compute another."""
        model = self._model()
        if model is None:
            raise RuntimeError("cache of a result: expected the model of the call to be alive at its first use")
        with torch.autocast(**self._autocast), rows_under(model, self._adapters):
            if (reason := self._mark.difference(model)) is not None:
                raise RuntimeError(f"cache of a result: expected the model to be as it was in the call at its first "
                                   f"use, and {reason}")
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            tokens, mask, positions = (None if t is None else t.to(model.device)
                                       for t in (self._tokens, self._mask, self._positions))
            assert tokens is not None
            # The prompts in one forward as in stock, since the values at padding positions depend on it.
            ends = range(self._width, tokens.shape[1], max(1, TOKENS_AT_ONCE // len(tokens)))
            for start, end in itertools.pairwise([0, *ends, tokens.shape[1]]):
                model(input_ids=tokens[:, start:end], attention_mask=None if mask is None else mask[:, :end],
                      position_ids=None if positions is None else positions[..., start:end], use_cache=True,
                      logits_to_keep=1, **{CACHE_NAME: cache})
        return cache


class LateCache(DynamicCache):
    """A `DynamicCache` that computes its layers at their first use and becomes an ordinary one.

    The engine reuses its pages, and most callers never read the cache of a result. A caller that does gets the result
    of the model's own forward for the same tokens and mask, which equals stock's cache.

    Pickles and copies are ordinary caches. Holds no memory of the engine and does not keep the model alive.

    Args:
        adapters: Adapters of the rows, as in `rows_under`.
    """

    def __init__(self, engine: Engine, model: Any, sequences: torch.Tensor, width: int,
                 model_kwargs: dict[str, Any], adapters: list[str | None]) -> None:
        # Without the base class's `__init__`, whose attributes would keep `__getattr__` from being called.
        self._call = _Call(engine, model, sequences, width, model_kwargs, adapters)

    def __getattr__(self, name: str) -> Any:
        if name == "_call" or name.startswith("__") or name not in vars(DynamicCache()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _fill(self)
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _fill(self)
        return self.__reduce_ex__(protocol)


def _fill(cache: Any) -> None:
    """Turn a `LateCache` into an ordinary `DynamicCache`."""
    call = vars(cache).get("_call")
    if call is None:  # another thread has filled it
        return
    with call.computing.rlock:
        if type(cache) is LateCache:
            made = vars(call.compute())
            vars(cache).update(made)
            cache.__class__ = DynamicCache  # type: ignore[assignment]
            del vars(cache)["_call"]
