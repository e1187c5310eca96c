"""Attention of towers that attend window by window, in one launch a layer, by views of their attention modules.

transformers' classes call their attention once a window, or once for all with the windows' starts if FlashAttention is
asked for. A view of such a module has a copy of its config, which names this file's implementation, as one of
FlashAttention. The model, its configs, and forwards of other threads see nothing of that.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.guards.hooks import only_captures
from hf_paged.kernels.attention.windowed import DTYPES, MOST_DIM, Windows, launches, windowed_attention
from hf_paged.models.executor import view_of
from hf_paged.models.images.encoded import is_close
from hf_paged.models.paged_calls import implementation_of, why_not_attention

NAME = "hf_paged_flash_windows"  # transformers' classes look for "flash" in the name
STOCK = "sdpa"  # the implementation whose rounding the kernel has
DEVICES = ("cuda",)
# Tokens of a window, on average, from which stock's calls are few, and its kernel was as fast or faster on an H100.
LONG = 2048
_STARTS, _LONGEST = "cu_seqlens", "max_seqlen"  # arguments of the modules
_WINDOWS = "hf_paged_windows"  # attribute of a view
_READ = ("position_bias", "softcap")  # what sdpa reads besides its named arguments
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_Kind = tuple[type, torch.dtype]


class _NotKnownError(Exception):
    """Attention that is not to all of a window, or to few long windows: the module makes its own calls."""


class TowerAttention:
    """Attention by windows in one launch a layer, for encoders of views of a body.

    A class whose module asks for windows has to make the same of its first input that tells as by its own calls, but
    for rounding; else it makes these. So do modules with hooks, forwards of instances, another implementation than
    "sdpa", gradients, few long windows (`LONG`), and all on a CPU. Thread-safe.
    """

    def __init__(self) -> None:
        self._proved: dict[_Kind, bool] = {}  # False: it makes its own calls

    def through(self, encode: Callable[..., Any], body: nn.Module) -> Callable[..., Any]:
        """Return ``encode``, a method of a view of a body that nothing else uses, over modules that attend at once."""
        @wraps(encode)
        def attending(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or why_not_attention(STOCK) is not None:
                return encode(*args, **kwargs)
            before, known = body._modules, dict[int, tuple[torch.Tensor, Windows]]()
            forwards = {path: _Attention(module, self._proved, known) for path, module in _attending(body)}
            vars(body)["_modules"] = view_of(body, forwards)._modules
            try:
                return encode(*args, **kwargs)
            finally:
                vars(body)["_modules"] = before

        return attending


class _Attention:
    """Forward of a view of an attention module, for one run of an encoder.

    Args:
        proved: by the module's class and the dtype of its input, whether it may attend at once.
        known: the windows of starts that came before, by the ids of these.
    """

    def __init__(self, module: Any, proved: dict[_Kind, bool], known: dict[int, tuple[torch.Tensor, Windows]]) -> None:
        self._module, self._proved, self._known = module, proved, known
        self._at_once, config = view_of(module, {}), copy.copy(module.config)
        vars(config)["_attn_implementation_internal"] = NAME
        vars(self._at_once)["config"] = config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self._module).forward
        starts, hidden = kwargs.get(_STARTS), args[0] if args else kwargs.get("hidden_states")
        if (not isinstance(starts, torch.Tensor) or not isinstance(hidden, torch.Tensor)
                or hidden.device.type not in DEVICES):
            return forward(self._module, *args, **kwargs)
        kind = type(self._module), hidden.dtype
        if self._proved.get(kind) is not False:
            try:
                made = forward(self._at_once, *args, **self._with_windows(kwargs, starts))
            except (_NotKnownError, ValueError):  # of starts that do not ascend, too: stock's own error says more
                return forward(self._module, *args, **kwargs)
            if kind in self._proved:
                return made
            expected = forward(self._module, *args, **kwargs)
            if not _tells(hidden, self._known[id(starts)][1]) or not _first(expected).isfinite().all():
                return expected  # which proves nothing
            self._proved[kind] = is_close(_first(made), _first(expected))
            return made if self._proved[kind] else expected
        return forward(self._module, *args, **kwargs)

    def _with_windows(self, kwargs: dict[str, Any], starts: torch.Tensor) -> dict[str, Any]:
        """Return the arguments with the longest window, for which the class would wait, if it takes that."""
        if id(starts) not in self._known:
            self._known[id(starts)] = starts, Windows(starts.cpu().numpy())
        windows = self._known[id(starts)][1]
        if windows.num_tokens >= LONG * windows.count:
            raise _NotKnownError
        vars(self._at_once)[_WINDOWS] = windows
        if kwargs.get(_LONGEST) is None and _takes_longest(type(self._module).forward):
            return {**kwargs, _LONGEST: windows.longest}
        return kwargs


def _attending(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a body that attend by windows as stock's code says, with their paths."""
    for path, module in body.named_modules():
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig) or not _asks_for_windows(type(module).forward):
            continue
        names = path.split(".")
        above = (body.get_submodule(".".join(names[:end])) for end in range(1, len(names)))
        if implementation_of(config) == STOCK and not any(map(_is_changed, (*above, *module.modules()))):
            yield path, module


@lru_cache(maxsize=1024)
def _asks_for_windows(forward: Callable[..., Any]) -> bool:
    """Return whether a class's forward takes starts of windows and asks whether FlashAttention is to have them all."""
    arguments, names = _names_in(forward)
    return _STARTS in arguments and names >= {"is_flash_attention_requested", "get_interface"}


@lru_cache(maxsize=1024)
def _takes_longest(forward: Callable[..., Any]) -> bool:
    """Return whether a class's forward takes the length of the longest window."""
    arguments, names = _names_in(forward)
    return _LONGEST in arguments or "get_max_seqlen" in names


def _names_in(forward: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of a forward's arguments, and of what its code calls."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return frozenset(), frozenset()
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]), frozenset(code.co_names)


def _is_changed(module: nn.Module) -> bool:
    """Return whether something else than its class's forward belongs to a module: a view would leave it out, or be
    seen by it."""
    state = vars(module)
    return ("forward" in state or state.get("_compiled_call_impl") is not None
            or any(state.get(name) and not all(map(only_captures, list(state[name].values()))) for name in _HOOKS))


def _tells(hidden: torch.Tensor, windows: Windows) -> bool:
    """Return whether tokens of a window differ: of equal ones, of a blank image, any scores make the same."""
    tokens, starts = hidden.flatten(0, -2), windows.starts
    differ = (tokens[1:] != tokens[:-1]).any(-1).cpu().numpy()
    differ[starts[(starts > 0) & (starts <= len(differ))] - 1] = False
    return bool(differ.any())


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None = None, *, scaling: float | None = None, dropout: float = 0.0,
               is_causal: bool | None = None, cu_seq_lens_q: torch.Tensor | None = None,
               cu_seq_lens_k: torch.Tensor | None = None, **others: Any) -> tuple[torch.Tensor, None]:
    """Attend like FlashAttention: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, D], None)."""
    windows: Windows | None = vars(module).get(_WINDOWS)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has_more = any(others.get(name) is not None for name in _READ)
    if torch.is_autocast_enabled(query.device.type):  # sdpa then computes in the autocast's dtype
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if (windows is None or cu_seq_lens_q is None or cu_seq_lens_q is not cu_seq_lens_k or causal or dropout or has_more
            or attention_mask is not None or not scale > 0 or not _fits(query, key, value, windows)):
        raise _NotKnownError
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return windowed_attention(q, k, v, windows, scale)[None], None


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, windows: Windows) -> bool:
    """Return whether the kernel takes these heads, and tokens that are those of the windows."""
    _, heads, tokens, dim = query.shape
    return (query.shape[0] == 1 and tokens == windows.num_tokens and key.shape == value.shape and dim <= MOST_DIM
            and key.shape == (1, key.shape[1], tokens, dim) and heads % key.shape[1] == 0
            and query.dtype == key.dtype == value.dtype and query.dtype in DTYPES)


def tower_launches(model: nn.Module, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield launches of the kernels that towers of a model need, for dry runs."""
    sizes = {(size, next((parameter.dtype for parameter in chain(module.parameters(), model.parameters())
                          if parameter.dtype in DTYPES), None))  # a quantized weight has not that of its products
             for _, module in _attending(model) if isinstance(size := getattr(module, "head_dim", None), int)}
    for dim, dtype in sorted(sizes, key=str):
        if dtype is not None and dim <= MOST_DIM and device.type in DEVICES:
            for x, windows in launches(dim, dtype, device):
                yield partial(windowed_attention, x, x, x, windows, 1.0)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
