"""Stock's forwards of a clone: a row alone, rows padded in a batch, and rows behind a filled cache."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged.models.base import StateKey
from hf_paged.models.proof.interface import end_if_stopped
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.recurrent import view


def parameters_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    return set(inspect.signature(inspect.unwrap(type(model).forward)).parameters)


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name of the cache among the arguments of a model's forward, or None."""
    return view.cache_argument(type(model).forward)


def forward(model: PreTrainedModel, tokens: list[int], first: int = 0,
            cache: DynamicCache | None = None) -> torch.Tensor:
    """Run one row alone, from position `first` on; returns its logits [T, V]."""
    end_if_stopped()
    options: dict[str, Any] = {"use_cache": False}
    if cache is not None and (name := cache_argument(model)) is not None:
        mask = torch.ones(1, first + len(tokens), dtype=torch.long)
        options = {name: cache, "use_cache": True, "attention_mask": mask}
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=torch.tensor([tokens]), position_ids=torch.arange(first, first + len(tokens))[None],
            return_dict=True, **options).logits[0]
    return logits


class Generated(NamedTuple):
    """Result of stock's `generate`: of each row its new tokens and their logits [rows, tokens, V], and the cache."""

    tokens: list[list[int]]
    logits: torch.Tensor
    cache: Any


def generate(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> Generated:
    """Generate greedily from left-padded prompts, by the function below every wrapper, as other programs set them."""
    end_if_stopped()
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    kind: Any = type(model)
    with torch.no_grad():
        made = inspect.unwrap(kind.generate)(
            model, input_ids=torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=new_tokens,
            do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None)
    cache = getattr(made, "cache", None) or getattr(made, "past_key_values", None)
    return Generated(made.sequences[:, width:].tolist(), torch.stack(made.logits, 1), cache)


class Entry(NamedTuple):
    """An update of a cache: keys and values [1, Hkv, S, D] that it returned."""

    layer: int
    keys: torch.Tensor
    values: torch.Tensor


class WatchedCache(DynamicCache):
    """Stock's cache, which notes its updates and what modeling code reads its length; `lie` is added to that length."""

    def __init__(self, model: PreTrainedModel, lie: int = 0) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self.entries: list[Entry] = []
        self.readers: set[str] = set()
        self._files, self._lie = modeling_files(model.modules()), lie

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.entries.append(Entry(layer_idx, keys, values))
        return keys, values

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        length: int = super().get_seq_length(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.endswith("cache_utils.py"):
            frame = frame.f_back
        file = frame.f_code.co_filename
        if file not in self._files:
            return length
        self.readers.add(f"{frame.f_code.co_name} ({linecache.getline(file, frame.f_lineno).strip()[:80]})")
        return length + self._lie


def filled_cache(model: PreTrainedModel, filling: dict[int, tuple[torch.Tensor, torch.Tensor]],
                 first: int, states: Mapping[StateKey, torch.Tensor]) -> DynamicCache:
    """Return a cache whose layers hold the first keys [S, Hkv, D] and values [S, Hkv, Dv] of `filling`, and states."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer, (keys, values) in filling.items() if first else ():
        cache.update(keys[:first].transpose(0, 1)[None], values[:first].transpose(0, 1)[None], layer)
    for (layer, kind, index), state in states.items() if first else ():
        (cache.update_conv_state if kind == "conv" else cache.update_recurrent_state)(state, layer, index)
    return cache
