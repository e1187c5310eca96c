"""What the runner needs of a model family: its KV shapes, its layers on packed tokens, and what it recognises."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel


class KVSpec(NamedTuple):
    """Shape of the cache a model needs: per layer K and V of [num_blocks, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def block_bytes(self, block_size: int) -> int:
        """Bytes that one block takes over all layers."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Attend(Protocol):
    """Writes K and V of the step's tokens into layer `layer`'s cache and attends over the pages."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
                 scale: float, sliding_window: int | None) -> torch.Tensor:  # fmt: skip
        """query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]."""
        ...


class ModelAdapter(ABC):
    """Runs one family's own modules, as they stand, on packed tokens. Keeps neither tensors nor the model alive."""

    model_class: ClassVar[type]

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> Any:
        """The model; RuntimeError once it is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this engine was garbage-collected")
        return model

    @abstractmethod
    def kv_spec(self) -> KVSpec:
        """Shapes, dtype and device of the cache, read off the modules."""

    @abstractmethod
    def max_length(self) -> int:
        """Longest sequence in tokens for which a packed step gives what stock gives."""

    @abstractmethod
    def hidden_states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids [T] and positions [T], both int64 -> final normed hidden states [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size]."""

    @abstractmethod
    def own_modules(self) -> Iterator[tuple[str, torch.nn.Module, type]]:
        """(name, module, expected class) of every module whose forward the adapter replaces by its own code."""

    @abstractmethod
    def called_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(name, module) of every module that the adapter calls as it stands, on packed tokens."""

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Upper estimate of what one step allocates: hidden states, the MLP's inputs, fp32 logits and their copies."""
        config, itemsize = self.model.config, self.kv_spec().dtype.itemsize
        per_token = (8 * config.hidden_size + 3 * config.intermediate_size) * itemsize
        return num_tokens * per_token + num_rows * config.vocab_size * 4 * 4
