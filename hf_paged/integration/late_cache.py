"""Cache in the result of a native call: a `DynamicCache` that computes its content at its first use.

The engine reuses its pages, and most callers never read the cache. A caller that does gets the result of the model's
own forward for the same tokens and mask, which equals stock's cache.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from transformers import DynamicCache

from hf_paged.engine.engine import Engine
from hf_paged.integration.adapter_rows import rows_under
from hf_paged.integration.cache_name import CACHE_NAME
from hf_paged.process_lock import ProcessLock

TOKENS_AT_ONCE = 8192  # new tokens of all rows in one forward


class _Call:
    """Inputs to recompute the keys and values of a call; keeps neither model nor engine alive."""

    def __init__(self, engine: Engine, model: Any, sequences: torch.Tensor, width: int,
                 model_kwargs: dict[str, Any], adapters: list[str | None]) -> None:
        self.computing = ProcessLock()
        self._model = weakref.ref(model)
        self._mark = engine.model_mark()
        device = model.device.type
        self._autocast = {"device_type": device, "enabled": torch.is_autocast_enabled(device),
                          "dtype": torch.get_autocast_dtype(device)}
        self._width, self._adapters = width, adapters
        self._tokens = sequences[:, :-1].clone()  # without the last token, which no forward has computed
        more = self._tokens.shape[1] - width
        self._mask, self._positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), more)], dim=1)
        if self._positions is not None:
            steps = torch.arange(1, more + 1, dtype=self._positions.dtype, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[:, -1:] + steps], dim=1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self) -> DynamicCache:
        """Compute stock's cache at the end of the call.

        Raises:
            RuntimeError: If the model was deleted, or would compute something else now.
        """
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
                      position_ids=None if positions is None else positions[:, start:end], use_cache=True,
                      logits_to_keep=1, **{CACHE_NAME: cache})
        return cache


class LateCache(DynamicCache):
    """A `DynamicCache` that computes its layers at their first use and becomes an ordinary one.

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
