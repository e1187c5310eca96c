"""Stock attention modules on pages: an implementation of transformers' `AttentionInterface` for the length of a call.

A module looks its implementation up in its config at every call. `paged_call` sets the name "hf_paged" there and takes
it out again; `running` keeps the step for its thread, since not every class hands keyword arguments down to its
attention. Other readers of the name in that time (another thread's plain forward, a copy or a pickle of the config)
have no step, and get what the config said before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.hub_kernels import is_kernel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.attention.registry import check_attention
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.guards.hints import FLASH_KERNEL, OWN_ATTENTION
from hf_paged.guards.original_classes import patched_entry
from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.kernels.layer.store_kv import check_tokens, store_kv
from hf_paged.models.base import AttentionMask, StepContext
from hf_paged.process_lock import ProcessLock

NAME = "hf_paged"
# Arguments that decoders hand down and paged attention does not use: not every module hands down its window.
IGNORED = frozenset({
    "position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "sliding_window", "cache_position", "return_dict", "cache", "past_key_values", "token_type_ids", "logits_to_keep",
})
# Implementations that read their name from the config again while they run; kernels of the Hub do so, too.
_READS_CONFIG = ("flash", "paged|")

_lock = ProcessLock()


class _Forward:
    """A forward over a step, whose n-th attention call reads and writes the n-th pool."""

    def __init__(self, step: StepContext, calls: tuple[AttentionMask, ...]) -> None:
        self.step, self._calls, self._num_calls = step, calls, 0

    def next_call(self) -> tuple[int, AttentionMask]:
        """Return the number of the attention call that is made now, and its mask."""
        call = self._num_calls
        self._num_calls += 1
        if call == len(self._calls):
            raise UnsupportedModelError(f"a forward called attention more than {call} times: expected {call} calls, "
                                        "one for each pool of the KV cache. Report the model's class.")
        return call, self._calls[call]

    def check_end(self) -> None:
        """Raise if attention was not called for every pool."""
        if self._num_calls != len(self._calls):
            raise UnsupportedModelError(
                f"a forward called attention {self._num_calls} times: expected {len(self._calls)} calls, one for "
                "each pool of the KV cache. Report the model's class.")


class _Running(threading.local):
    """The forward over a step that each thread runs now."""

    forward: _Forward | None = None


_running = _Running()

# By id of a config that paged calls have switched: the config, and the thread of each of these calls.
_switched: dict[int, tuple[PreTrainedConfig, list[int]]] = {}


class PagedName(str):
    """Name "hf_paged" in a config, with the replaced name `stock`, which deep copies and pickles of it restore."""

    stock: str | None

    def __new__(cls, stock: str | None) -> PagedName:
        name = super().__new__(cls, NAME)
        name.stock = stock
        return name

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return (type(None), ()) if self.stock is None else (str, (self.stock,))

    def __deepcopy__(self, memo: dict) -> str | None:
        return self.stock


@contextmanager
def paged_call(configs: Iterable[PreTrainedConfig]) -> Iterator[None]:
    """Let modules of these configs attend to pages when they get a step, in a ``with`` block; restores the configs."""
    held: list[PreTrainedConfig] = []
    try:
        for config in configs:
            with _lock.rlock:
                _switched.setdefault(id(config), (config, []))[1].append(threading.get_ident())
                held.append(config)
                config._attn_implementation_internal = PagedName(implementation_of(config))
        yield
    finally:
        for config in held:
            with _lock.rlock:
                threads = _switched[id(config)][1]
                threads.remove(threading.get_ident())
                if not threads:
                    config._attn_implementation_internal = implementation_of(config)
                    del _switched[id(config)]  # last: a forked child restores the name by it


def is_in_step() -> bool:
    """Return whether this thread runs a forward over a step."""
    return _running.forward is not None


@contextmanager
def running(step: StepContext, calls: tuple[AttentionMask, ...]) -> Iterator[None]:
    """Let this thread's attention calls in a paged call attend over the pages of `step`, in a ``with`` block.

    ``calls``: of each attention call of the forward, in order; another number of calls raises UnsupportedModelError.
    """
    before = _running.forward
    _running.forward = forward = _Forward(step, calls)
    try:
        yield
        forward.check_end()
    finally:
        _running.forward = before


def implementation_of(config: PreTrainedConfig) -> str | None:
    """Return `config._attn_implementation` as it is outside of paged calls."""
    name: str | None = config._attn_implementation
    return name.stock if isinstance(name, PagedName) else name


def is_flash(name: str | None) -> bool:
    """Return whether an implementation is FlashAttention, or a kernel of the Hub that transformers calls like it."""
    return ALL_ATTENTION_FUNCTIONS.get(name) is flash_attention_forward


def why_not_attention(name: str | None) -> Reason | None:
    """Return why an attention implementation may not be plain softmax attention, as transformers' own are, or None."""
    function, mask = ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if name is None:
        return Reason("attention implementation None, for which stock makes no causal mask", remedy=OWN_ATTENTION)
    if function is None and name != "eager":
        return Reason("attention implementation {} is not one of transformers' own", repr(name), remedy=OWN_ATTENTION)
    if mask is None:
        return Reason("attention implementation {}, for which stock makes no mask", repr(name), remedy=OWN_ATTENTION)
    if is_kernel(name) and not is_flash(name):
        return Reason("attention implementation {} is a Hub kernel that transformers does not call as FlashAttention",
                      repr(name), remedy=FLASH_KERNEL)
    for entry in (function, mask):
        if entry is not None and (place := patched_entry(entry)) is not None:
            return Reason("attention implementation {} is not one of transformers' own: {} is patched", repr(name),
                          place, remedy=OWN_ATTENTION)
    return None


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
               **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Attend like stock: rotated query [B, Hq, T, D], key and value [B, Hkv, T, D] -> ([B, T, Hq, D], None)."""
    if (forward := _running.forward) is not None:
        return _paged_attention(module, query, key, value, forward, **kwargs), None
    name = _stock_name(module.config)
    stock: Any = (sys.modules[type(module).__module__].eager_attention_forward if name == "eager"
                  else ALL_ATTENTION_FUNCTIONS[name])
    return stock(module, query, key, value, attention_mask, **kwargs)


def _paged_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward: _Forward, *,
                     scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
                     s_aux: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
    unknown = [name for name, given in others.items() if given is not None and name not in IGNORED]
    if dropout or unknown:
        raise UnsupportedModelError(f"{type(module).__name__} asks of its attention what pages do not have: "
                                    f"{', '.join(unknown) or f'dropout={dropout}'}")
    if softcap is not None and implementation_of(module.config) == "sdpa":
        softcap = None  # sdpa, the default of Gemma 2 in transformers 5.17, ignores it
    batch = len(query)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    call, mask = forward.next_call()
    step, scale = forward.step, query.shape[-1] ** -0.5 if scaling is None else scaling
    caches, options = step.kv_cache(call), AttentionOptions(scale, mask.window, softcap, s_aux, mask.chunk)
    if torch.is_autocast_enabled(query.device.type):  # any attention then computes in the autocast's dtype
        query, key, value = (x.to(caches[0].dtype) for x in (query, key, value))
    check_tokens(key, value, *caches, step.slot_mapping)  # stock's modules made these tensors
    store_kv(key, value, *caches, step.slot_mapping)
    check_attention(query, *caches, options)
    return step.attend(call, query, options).unflatten(0, (batch, -1))


def _mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
    """Make stock's mask for plain forwards of other callers: paged attention needs none."""
    if _running.forward is not None:
        return None
    stock = ALL_MASK_ATTENTION_FUNCTIONS.get(_stock_name(config))
    return None if stock is None else stock(*args, config=config, **kwargs)


def _stock_name(config: PreTrainedConfig) -> str | None:
    name = implementation_of(config)
    if name == NAME or (name or "").startswith(_READS_CONFIG) or is_kernel(name):
        raise RuntimeError(
            f"a plain forward with attention implementation {name!r} met a paged generate of the same config in "
            "another thread; expected one after the other, or 'sdpa' or 'eager'"
        )
    return name


def forget_other_threads() -> None:
    """Restore the names in configs of paged calls whose threads a forked child lacks: there these calls never end."""
    for key, (config, threads) in list(_switched.items()):
        threads[:] = [thread for thread in threads if thread == threading.get_ident()]
        if not threads:
            config._attn_implementation_internal = implementation_of(config)
            del _switched[key]


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
