"""Attention implementation of a clone: each call of a module goes to the engine that its thread has set.

The name is set in the configs of a proof's own clones alone; a thread without an engine never meets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "hf_paged_proof"


class AttentionEngine(Protocol):
    """Computes the attention of a clone's modules."""

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Attend: query [B, Hq, T, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> [B, T, Hq, Dv]."""


class Masks:
    """Mask functions that stock handed to the mask interface, by the storage of the mask that answered the call."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Callable, torch.Tensor]] = {}

    def make(self, function: Callable, shape: tuple[int, ...], device: Any) -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._made[mask.untyped_storage()._cdata] = function, mask
        return mask

    def function_of(self, mask: torch.Tensor) -> Callable | None:
        """Return the function of a mask or of a view of one; None for a mask that was computed from it."""
        return self._made.get(mask.untyped_storage()._cdata, (None,))[0]


class StoppedError(BaseException):
    """The caller of a proof waits no longer for it."""


class ProofThread(threading.Thread):
    """Thread of a proof, which ends at its next forward once `stopped` is set."""

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=NAME, daemon=True)
        self.stopped = threading.Event()


def end_if_stopped() -> None:
    """Raise `StoppedError` in a proof's thread whose caller waits no longer."""
    thread = threading.current_thread()
    if isinstance(thread, ProofThread) and thread.stopped.is_set():
        raise StoppedError


class _Thread(threading.local):
    engine: AttentionEngine | None = None
    masks: Masks | None = None
    attends = False


_thread = _Thread()


@contextmanager
def answered_by(model: PreTrainedModel, engine: AttentionEngine) -> Iterator[Masks]:
    """Let `engine` answer attention calls of a clone in this thread, in a ``with`` block; yields the masks made."""
    end_if_stopped()
    before = [(config, config._attn_implementation) for config in configs_of(model)]
    _thread.engine, _thread.masks = engine, Masks()
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield _thread.masks
    finally:
        _thread.engine = _thread.masks = None
        for config, name in before:
            config._attn_implementation_internal = name


def is_attending() -> bool:
    """Return whether this thread is within an engine's attention."""
    return _thread.attends


def embeddings_of(model: Any) -> nn.Parameter:
    """Return the table of a model's token embeddings [V, D]."""
    table: nn.Parameter = model.get_input_embeddings().weight
    return table


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs that modules of a model hold, each once."""
    held = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in held if isinstance(config, PreTrainedConfig)}.values())


def _attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    assert _thread.engine is not None
    _thread.attends = True
    try:
        return _thread.engine(module, query, key, value, attention_mask, **options), None
    finally:
        _thread.attends = False


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Callable, device: Any = "cpu",
          **others: Any) -> torch.Tensor:
    assert _thread.masks is not None
    return _thread.masks.make(mask_function, (batch_size, 1, q_length, kv_length), device)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
