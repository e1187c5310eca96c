"""View of rows' recurrent states as a cache of transformers.

Layers of delta nets, Mamba and short convolutions ask a cache for a convolution's last inputs and for a recurrent state
(`get_conv_state`, `get_recurrent_state`), change them in place, or hand new ones in (`update_conv_state`,
`update_recurrent_state`). A `StateView` answers for some rows of one forward, over tensors with a slot for each row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.recurrent._convolution import LayerStates
from hf_paged.kernels.recurrent.packed_convolution import PackedRows
from hf_paged.models.base import StateKey

HAS_IDIOM = hasattr(Cache, "get_conv_state")  # transformers 5.17 has it not
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of the argument, by version of transformers and class


class Lines(NamedTuple):
    """States of a layer in all slots, as kernels take them: see `kernels/recurrent`. ``slots`` [R] int32: of the rows.
    """

    states: LayerStates
    arrivals: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor | None


class StateView(Cache):
    """The states of the rows of one forward: gathered from slots, and put back by `store`; those of a layer, of rows
    that have states, already when another layer asks for its own.

    Keys and values are handed back as they come: attention finds earlier ones in its pages.

    Args:
        tensors: the states by key, each [num_slots, ...].
        slots: [R] int32 or int64, the slot of each row.
        is_new: whether the rows begin, without a state; else all of them have one.
        lengths: [R] int32, of a step of decode rows: 0 for padding.
        arrivals: counters of kernels, see `mamba2`; None if no kernel changes states.
        packed: prompts of any lengths one behind the other, whose states kernels alone read and change (`slots`: its
            own); None: rows have as many tokens each.
    """

    def __init__(self, tensors: Mapping[StateKey, torch.Tensor], slots: torch.Tensor, *, is_new: bool,
                 lengths: torch.Tensor | None = None, arrivals: torch.Tensor | None = None,
                 packed: PackedRows | None = None) -> None:
        super().__init__(layers=[])
        self.held: dict[StateKey, torch.Tensor] = {}  # what this forward read or made, each [R, ...]
        self._tensors, self._given, self._slots, self._is_new = tensors, slots, slots.long(), is_new
        self._lengths, self._arrivals, self._layer, self.packed = lengths, arrivals, -1, packed

    @property
    def num_rows(self) -> int:
        """Rows of the forward's batch."""
        return len(self._slots) if self.packed is None else 1

    def lines(self, layer_idx: int) -> Lines:
        """Return the states of a layer for a kernel that changes them in place; no other code of this forward reads or
        hands in states of the layer."""
        assert self._arrivals is not None
        states = LayerStates(self._tensors[layer_idx, "conv", 0], self._tensors[layer_idx, "recurrent", 0])
        return Lines(states, self._arrivals, self._given, self._lengths)

    def store(self) -> None:
        """Put the states into their slots; raises UnsupportedModelError if there are others than slots have.

        In a dry run, whose states are made up, or left out, slots keep theirs.
        """
        if is_dry():
            self.held = {}
            return
        if (self._is_new and self.held.keys() != self._tensors.keys()) or not self.held.keys() <= self._tensors.keys():
            raise UnsupportedModelError("a forward made other states than its class did before: expected "
                                        f"{sorted(self._tensors)}, got {sorted(self.held)}. Report the model's class.")
        for key, state in self.held.items():
            tensor = self._tensors[key]
            if state.shape[1:] != tensor.shape[1:]:
                raise UnsupportedModelError(f"the state {key} has shape {[*state.shape[1:]]}: expected "
                                            f"{[*tensor.shape[1:]]}. Report the model's class.")
            tensor.index_copy_(0, self._slots, state.to(tensor.dtype))
        self.held = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read((layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0,
                          conv_kernel_size: int | None = None, **kwargs: Any) -> torch.Tensor:
        """Append inputs [R, ..., T] of a convolution, and return them behind the earlier ones, or behind zeros."""
        key = (layer_idx, "conv", state_idx)
        before = self._read(key)
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            full = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size, full = before.shape[-1], torch.cat([before, conv_states], -1)
        self.held[key] = full[..., -size:].clone()
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0,
                               **kwargs: Any) -> torch.Tensor:
        key = (layer_idx, "recurrent", state_idx)
        before = self._read(key)
        self.held[key] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return self.held[key]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def _read(self, key: StateKey) -> torch.Tensor | None:
        if key not in self.held:
            if self._is_new or key not in self._tensors:
                return None
            assert self.packed is None, "states of packed rows are read by kernels alone"
            if key[0] != self._layer:
                self.store()  # states of all layers at once would take as much memory as the slots of the rows
                self._layer = key[0]
            self.held[key] = self._tensors[key].index_select(0, self._slots)
        return self.held[key]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._is_new

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows have unlike lengths. Proofs find classes that compute with the number."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def recorder() -> StateView:
    """Return a view of one new row without slots, whose `held` shows which states a forward makes."""
    return StateView({}, torch.zeros(1, dtype=torch.int64, device="cpu"), is_new=True)


def keeps_states(config: PreTrainedConfig) -> bool:
    """Return whether stock's cache of such a model holds recurrent states."""
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except Exception:  # a config of which stock makes a cache of another class
        return False
    return any(hasattr(layer, "recurrent_states") for layer in layers)


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache among the arguments of a forward, or None."""
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)
