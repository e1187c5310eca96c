"""Hooks of transformers' methods in `GenerationMixin`, placed while a model is enabled.

A hook checks whether *this object* is enabled; for every other object it calls the original method. Model classes and
all other methods stay unchanged.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from transformers import GenerationMixin

from hf_paged.engine.engine import Engine
from hf_paged.guards.origin import chain_of
from hf_paged.integration import fallback, generate, paths, ranks, stock_loop
from hf_paged.integration.caches import CACHE_NAME
from hf_paged.integration.continuous_batching.methods import METHODS, destroy_cached_manager
from hf_paged.integration.enabled import ENGINES, engine_of, model_of, view_of
from hf_paged.integration.recognise.inputs import has_images
from hf_paged.integration.recognise.structured import with_structure
from hf_paged.options.settings import option_reason
from hf_paged.process_lock import ProcessLock

lock = ProcessLock()  # held to enable or disable models and to replace methods
_holders = 0  # calls of `hold` minus calls of `release`
_CUSTOM = 10  # index of `custom_generate` after `self`; a function that replaces stock's `generate` may hide it
_ENCODES = "_prepare_multimodal_encoder_kwargs_for_generation"  # since 5.24
_MISSING = object()  # GenerationMixin inherits the method and does not define it
_replaced: dict[Callable, Any] = {}  # by hook: the original attribute of GenerationMixin
before_first_call: list[Callable[[Any], None]] = []  # called with the model of each hooked call, for `install`


def place() -> None:
    """Place missing hooks in `GenerationMixin`; a hook inside another function's wrapper counts as placed."""
    with lock.rlock:
        for name, make in _HOOKS.items():
            current = getattr(GenerationMixin, name)
            if any(map(_is_hook, chain_of(current))):
                continue
            own = GenerationMixin.__dict__.get(name, _MISSING)
            hook = make(_inherited(name, current) if own is _MISSING else current)
            _replaced[hook] = own
            setattr(GenerationMixin, name, hook)


def put_back_if_unused() -> None:
    """Restore the methods if no model is enabled and no `hold` is open.

    A hook that another program replaced or wrapped stays there, and calls the original method.
    """
    with lock.rlock:
        if ENGINES or _holders:
            return
        for name in _HOOKS:
            hook: Any = GenerationMixin.__dict__.get(name)
            if not _is_hook(hook):
                continue
            own = _replaced.pop(hook)
            if own is _MISSING:
                delattr(GenerationMixin, name)
            else:
                setattr(GenerationMixin, name, own)


def replaced() -> str | None:
    """Return the name of the first hooked method that another program replaced or wrapped, or None."""
    return next((name for name in _HOOKS if not _is_hook(GenerationMixin.__dict__.get(name))), None)


def _is_hook(function: Any) -> bool:
    return isinstance(function, FunctionType) and function in _replaced


def _inherited(name: str, current: Callable) -> Callable:
    """Return a method that calls what `GenerationMixin` inherits under a name at the time of each call."""

    @functools.wraps(current)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(GenerationMixin, self), name)(*args, **kwargs)

    return method


def hold() -> None:
    """Place the hooks and keep them until the matching call of `release`."""
    global _holders
    with lock.rlock:
        _holders += 1
        place()


def release() -> None:
    global _holders
    with lock.rlock:
        _holders -= 1
        put_back_if_unused()


@contextmanager
def held() -> Iterator[None]:
    hold()
    try:
        yield
    finally:
        release()


def _generate_hook(original: Callable) -> Callable:
    """Hook `generate`: call stock's over a view of the model, or fall back if the call reaches no decoding method."""

    @functools.wraps(original)
    def generate_(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, engine = _of_call(self)
        if engine is None:
            return original(model, *args, **kwargs)
        is_assistant = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if is_assistant and fallback.in_fallback():  # a draft model within a call that runs in stock
            with fallback.quiet_fallbacks(engine):
                return original(model, *args, **kwargs)
        is_inner = fallback.in_fallback(engine)
        with nullcontext() if is_inner else ranks.refusing(engine), paths.answered():
            if (structured := kwargs.pop("structured", None)) is not None:
                kwargs["logits_processor"] = with_structure(engine, structured, args, kwargs)
            loop = args[_CUSTOM] if len(args) > _CUSTOM else kwargs.get("custom_generate")
            reason = engine.class_reason()
            if loop is not None:
                reason = option_reason("custom_generate", loop)
            elif kwargs.get("cache_implementation") == "paged":
                reason = option_reason("cache_implementation", "paged")
            # Custom or overridden decoding gets the model itself, not a view.
            receiver = model if reason is not None else view_of(model, _decoding_methods)
            call = functools.partial(original, receiver, *args, **kwargs)
            if is_inner or reason is None:
                return call()
            ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            width = ids.shape[-1] if isinstance(ids, torch.Tensor) else 0
            # With padding, which cannot be recognised here.
            return fallback.fall_back(engine, reason, call, lambda result: paths.new_tokens(
                result, width, (), model.generation_config))
        return None  # `answered` ended a call of `explain`

    return generate_


def _batching_hook(function: Callable, original: Callable, *, begins: bool = True) -> Callable:
    """Hook a method of continuous batching: `function(original, model, engine, ...)` for an enabled model.

    `begins`: the method may begin requests, so that `install` enables the model, and calls within stock stay there.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, engine = _of_call(self, enables=begins)
        if engine is None or (begins and fallback.in_fallback(engine)):
            return original(model, *args, **kwargs)
        return function(original, model, engine, *args, **kwargs)

    return method


def _of_call(self: Any, *, enables: bool = True) -> tuple[Any, Engine | None]:
    """Return the model of a call, which `install` may enable, and its engine or None if it is not enabled."""
    model = model_of(self)
    for prepare in before_first_call if enables else ():
        prepare(model)
    return model, engine_of(model)


def _decoding_methods(stock: Any) -> dict[str, Callable]:
    """Return the methods of a view that stock generate looks up on the class of `self`."""
    encodes = {_ENCODES: _equal_images_once(stock)} if hasattr(stock, _ENCODES) else {}
    return encodes | {
        "_sample": generate.sample_method(stock),
        "_beam_search": stock_loop.beam_search_method(stock),
        "_assisted_decoding": generate.assisted_method(stock),
        "_prepare_cache_for_generation": _no_cache_for_a_question(stock),
    }


def _equal_images_once(stock: Any) -> Callable:
    @functools.wraps(getattr(stock, _ENCODES))
    def encode(self: Any, model_kwargs: dict[str, Any]) -> Any:
        """Call stock's, with encoders that run once over equal images."""
        model = model_of(self)
        engine = engine_of(model) if has_images(model_kwargs) and paths.asked() is None else None
        view = None if engine is None or fallback.in_fallback(engine) else engine.encoding_view()
        return getattr(stock, _ENCODES)(model if view is None else view, model_kwargs)

    return encode


def _no_cache_for_a_question(stock: Any) -> Callable:
    @functools.wraps(stock._prepare_cache_for_generation)
    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
                                      **kwargs: Any) -> Any:
        """Call stock's; in a call of `explain`, allocate no cache and leave the caller's unchanged."""
        if paths.asked() is not None:
            if (given := model_kwargs.get(CACHE_NAME)) is None:
                return None
            model_kwargs[CACHE_NAME] = copy.copy(given)
        return stock._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)

    return _prepare_cache_for_generation


# Factories of hooks by method name; each gets the current method.
_HOOKS: dict[str, Callable[[Callable], Callable]] = {
    "generate": _generate_hook,
    **{name: functools.partial(_batching_hook, function) for name, function in METHODS.items()},
    "destroy_cached_continuous_batching_manager": functools.partial(
        _batching_hook, destroy_cached_manager, begins=False),
}
