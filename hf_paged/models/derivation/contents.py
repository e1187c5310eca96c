"""Contents of a model's modules besides the numbers of their tensors, as values that JSON holds and that compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_paged.guards.snapshot import KEPT_BY_GENERATE
from hf_paged.models.derivation.executor import modules_below
from hf_paged.models.proof.store import values_of
from hf_paged.parallel.layers import Sharded

# Where a model comes from, how it is trained, which row of an embedding gets no gradient, a number of tokens that
# `resize_token_embeddings` leaves as it was, and forwards, which eligibility looks at.
_NOT_READ = frozenset({"name_or_path", "warnings_issued", "generation_config", "model_tags", "training",
                       "gradient_checkpointing", "padding_idx", "vocab_size", "forward", KEPT_BY_GENERATE})
# Ends of names of what a forward beyond the original length leaves in a rotary module, and a shorter one sets anew.
_LEFT_BEHIND = ("max_seq_len_cached", "long_inv_freq")
# What tells the ranks apart that hold a layer's parts.
_OF_RANK = frozenset({"group", "shards", "first", "num_real"})
_PLAIN = (bool, int, float, str, type(None))


def contents_of(model: nn.Module) -> dict[str, Any]:
    """Return what each module below a model holds by name, by the module's path: values, and shapes of tensors."""
    digests: dict[int, str] = {}

    def digest(config: PreTrainedConfig) -> str:
        if id(config) not in digests:
            digests[id(config)] = hashlib.sha256(values_of(config).encode()).hexdigest()[:16]
        return digests[id(config)]

    return {path: _of_module(module, digest) for path, module in modules_below(model, ())}


def _of_module(module: nn.Module, digest: Callable[[PreTrainedConfig], str]) -> dict[str, Any]:
    not_read = _NOT_READ | _OF_RANK if isinstance(module, Sharded) else _NOT_READ
    held = {name: value for name, value in vars(module).items()
            if name[0] != "_" and name not in not_read and not name.endswith(_LEFT_BEHIND)}
    tensors = {name: value for name, value in {**held, **module._parameters, **module._buffers}.items()
               if isinstance(value, torch.Tensor)}
    return {name: _described(value, digest) for name, value in held.items() if name not in tensors} | {
        f"shape of {name}": list(tensor.shape) for name, tensor in tensors.items()}


def _described(value: Any, digest: Callable[[PreTrainedConfig], str]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, PreTrainedConfig):
        return digest(value)
    if isinstance(value, (list, tuple)):
        return [_described(one, digest) for one in value]
    if isinstance(value, dict):
        return {str(name): _described(one, digest) for name, one in value.items()}
    if isinstance(value, (torch.dtype, torch.Size)):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
