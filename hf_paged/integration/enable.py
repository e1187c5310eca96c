"""Enabling a model: its class is swapped for a subclass whose `_sample` runs on the engine. Nothing else changes."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged import at_fork
from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration import fallback, generate, paths, ranks, stock_loop
from hf_paged.integration.cache_name import CACHE_NAME
from hf_paged.integration.continuous_batching import methods
from hf_paged.integration.engines import ENGINES, engine_of
from hf_paged.integration.paged_cache import PagedCache
from hf_paged.integration.structured_calls import with_structure
from hf_paged.models import SUPPORTED, find_executor
from hf_paged.options.settings import option_reason
from hf_paged.parallel.group import group_of

_swapping = threading.RLock()  # a model's class is looked at and changed by one thread at a time


def enable(model: nn.Module, config: PagedConfig | None = None, **overrides: Any) -> nn.Module:
    """Make `model.generate` run on a paged KV cache. The weights, the object and its state_dict stay as they are.

    Args:
        model: a causal LM of a supported family, or a PeftModel, a torch.compile'd or a DDP-wrapped one around it.
        config: how to run; None: the defaults.
        **overrides: single fields of `PagedConfig`.

    Returns:
        `model` itself. A model that is enabled already gets a new engine if `config` or `overrides` are given.

    Raises:
        UnsupportedModelError (a TypeError): no supported causal LM is inside.
        ValueError, TypeError: a field of the config, named.
    """
    causal_lm = unwrap(model)
    settings = merged_config(config, overrides)
    if causal_lm in ENGINES and config is None and not overrides:
        return model
    if group_of(causal_lm).driven:
        raise ValueError("model: its other ranks follow the PagedGenerator that loaded it; give the settings to "
                         "PagedGenerator.from_pretrained")
    enable_with_engine(causal_lm, settings)
    return model


def merged_config(config: PagedConfig | None, overrides: dict[str, Any]) -> PagedConfig:
    """`overrides` over `config`; TypeError for a name that is no field."""
    if config is not None and not isinstance(config, PagedConfig):
        raise TypeError(f"config={config!r:.80}: expected a PagedConfig or None")
    if unknown := set(overrides) - {field.name for field in dataclasses.fields(PagedConfig)}:
        raise TypeError(f"{sorted(unknown)}: expected fields of PagedConfig")
    return dataclasses.replace(config or PagedConfig(), **overrides)


def enable_with_engine(causal_lm: PreTrainedModel, config: PagedConfig, **engine_options: Any) -> Engine:
    """Swap the class of an unwrapped model and give it a new `Engine`."""
    engine = Engine(causal_lm, config, **engine_options)
    disable(causal_lm)
    with _swapping:
        stock: Any = type(causal_lm)
        causal_lm.__class__ = _enabled_class(stock)
        ENGINES[causal_lm] = engine
    return engine


@contextmanager
def as_if_enabled(causal_lm: PreTrainedModel) -> Iterator[Engine]:
    """The engine that an unwrapped model has, or would have; in here its methods are the enabled class'.

    For `paths.asking`: of a model that is not enabled, other threads' calls stay in stock.
    """
    with _swapping:
        stock: Any = type(causal_lm)
        if (engine := ENGINES.get(causal_lm)) is None:
            engine = Engine(causal_lm, PagedConfig())
            causal_lm.__class__ = _enabled_class(stock)
        try:
            yield engine
        finally:
            causal_lm.__class__ = stock


def disable(model: nn.Module) -> nn.Module:
    """Give back the stock object: its class, no trace of hf_paged. A model that is not enabled is left alone.

    Raises:
        RuntimeError: its class was swapped again after `enable` (FSDP2's `fully_shard` does that).
        UnsupportedModelError: no causal LM is inside.
    """
    causal_lm = unwrap(model)
    if causal_lm not in ENGINES:
        return model
    if "_hf_paged_stock_class" not in type(causal_lm).__dict__:
        raise RuntimeError(
            f"disable: somebody made the model's class, {type(causal_lm).__name__}, from the enabled one; undo that "
            "first (for FSDP2: disable before fully_shard)"
        )
    engine = ENGINES[causal_lm]
    try:
        engine.shutdown()  # waits for a call in lockstep, whose forwards need the class as it is
    finally:
        with _swapping:
            if ENGINES.get(causal_lm) is engine:  # not disabled by another thread in the meantime
                causal_lm.__class__ = type(causal_lm).__dict__["_hf_paged_stock_class"]
                del ENGINES[causal_lm]
    return model


def is_enabled(model: nn.Module) -> bool:
    """True while `model`, or the causal LM inside it, is enabled."""
    try:
        return unwrap(model) in ENGINES
    except UnsupportedModelError:
        return False


def get_engine(model: nn.Module) -> Engine:
    """The engine of an enabled model.

    Raises:
        ValueError: the model is not enabled.
    """
    causal_lm = unwrap(model)
    if causal_lm not in ENGINES:
        raise ValueError(f"model={type(causal_lm).__name__}: expected a model that hf_paged.enable was called on")
    return ENGINES[causal_lm]


@contextmanager
def weight_update(model: nn.Module) -> Iterator[None]:
    """`Engine.weight_update` of an enabled model.

    Raises:
        ValueError: the model is not enabled.
    """
    with get_engine(model).weight_update():
        yield


def unwrap(model: Any) -> PreTrainedModel:
    """The causal LM inside torch.compile's OptimizedModule, DDP and PEFT wrappers.

    Raises:
        UnsupportedModelError: it is of no class that is supported.
    """
    inner = innermost(model)
    if not isinstance(inner, PreTrainedModel) or (inner not in ENGINES and find_executor(inner) is None):
        inside = "" if inner is model else f" (with a {type(inner).__name__} inside)"
        raise UnsupportedModelError(
            f"model={type(model).__name__}{inside}: expected one of {', '.join(SUPPORTED)}, bare or wrapped"
        )
    return inner


def unsupported_class(causal_lm: Any) -> Reason | None:
    """Why a model can never be enabled, or None."""
    if find_executor(causal_lm) is not None:
        return None
    return Reason(f"{type(causal_lm).__name__} is no class that the paged engine runs",
                  remedy=f"It runs in stock. The engine runs {', '.join(SUPPORTED)}.")


def innermost(model: Any) -> Any:
    """What is inside these wrappers, whatever it is."""
    inner = model
    while True:
        if isinstance(inner, torch._dynamo.OptimizedModule):
            inner = inner._orig_mod
        elif isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif hasattr(inner, "get_base_model") and hasattr(inner, "peft_config"):
            inner = inner.get_base_model()
        else:
            return inner


@at_fork.in_child
def _renew_in_child() -> None:
    """The thread that was swapping a class when another one forked does not exist in the child."""
    global _swapping
    _swapping = at_fork.renewed(_swapping)


@functools.cache
def _enabled_class(stock: Any) -> type:
    """The subclass that an enabled `stock` model becomes. Name and module stay: saved configs and look-ups use them."""
    namespace: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "_hf_paged_stock_class": stock,
        "__reduce_ex__": _reduce_to_stock(stock),
        "_sample": generate.sample_method(stock),
        "_beam_search": _lockstep_beam_search(stock),
        "_assisted_decoding": generate.assisted_method(stock),
        "generate": _announcing_generate(stock),
        "load_custom_generate": _announcing_load(stock),
        "_prepare_cache_for_generation": _no_cache_for_a_question(stock),
        "__call__": _paged_call(stock),
        **methods.overrides(stock),
    }
    if hasattr(stock, "_orig_cls_mro_index"):  # FSDP2's: `type(model)(config)` makes the class that it was derived from
        namespace["_orig_cls_mro_index"] = stock._orig_cls_mro_index + 1
    return type(stock.__name__, (stock,), namespace)


def _reduce_to_stock(stock: Any) -> Callable:
    def __reduce_ex__(self: Any, protocol: Any) -> tuple:
        """Pickles and copies are stock objects: without an engine, and loadable where hf_paged is not installed."""
        rebuild, args, *state = stock.__reduce_ex__(self, max(int(protocol), 2))
        args = tuple(stock if arg is type(self) else arg for arg in args)
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes the very class of the object, which is the enabled one.
            rebuild, args = copyreg._reconstructor, (stock, object, None)  # type: ignore[attr-defined]
        return rebuild, args, *state

    return __reduce_ex__


def _announcing_generate(stock: Any) -> Callable:
    @functools.wraps(stock.generate)
    def generate_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock generate, with the warning where it never comes to `_sample`."""
        engine = engine_of(self)
        outermost = None if engine is None or fallback.in_fallback(engine) else engine
        with nullcontext() if outermost is None else ranks.refusing(outermost), paths.answered():
            if engine is not None and (structured := kwargs.pop("structured", None)) is not None:
                kwargs["logits_processor"] = _structured(self, engine, structured, args, kwargs)
            call = functools.partial(stock.generate, self, *args, **kwargs)
            if outermost is not None:
                for name, values in (("custom_generate", None), ("cache_implementation", ("paged",))):
                    value = kwargs.get(name)
                    if value is not None and (values is None or value in values):
                        reason = option_reason(name, value)
                        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
                        return fallback.fall_back(outermost, reason, call, _after_the_prompt(self, ids))
            return call()
        return None

    return generate_


def _structured(model: Any, engine: Engine, structured: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The logits processors of a call of `generate` with these arguments."""
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids", kwargs.get("inputs_embeds")))
    num_prompts = len(inputs) if isinstance(inputs, torch.Tensor) else 1
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None and engine.tokenizer is None:
        raise ValueError(f"structured={structured!r:.200}: expected tokenizer= beside it, by which texts become tokens")
    return with_structure(engine, num_prompts, structured, tokenizer, kwargs.get("logits_processor"))


def _after_the_prompt(model: Any, ids: Any) -> Callable[[Any], int]:
    """Counts the tokens that somebody's own decoding returned after these prompts; what is padding, nobody knows."""
    width = ids.shape[-1] if isinstance(ids, torch.Tensor) else 0
    return lambda result: paths.new_tokens(result, width, (), model.generation_config)


def _announcing_load(stock: Any) -> Callable:
    """For decoding methods that transformers moved to the Hub, and fetches by itself."""

    @functools.wraps(stock.load_custom_generate)
    def load_custom_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self)
        if engine is None or fallback.in_fallback(engine):
            return stock.load_custom_generate(self, *args, **kwargs)
        reason = option_reason("custom_generate", args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        paths.answer(engine, "stock", reason)
        loaded = stock.load_custom_generate(self, *args, **kwargs)

        def announced(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", kwargs.get("inputs"))
            call = functools.partial(loaded, *args, **kwargs)
            return fallback.fall_back(engine, reason, call, _after_the_prompt(self, ids))

        return announced

    return load_custom_generate


def _no_cache_for_a_question(stock: Any) -> Callable:
    @functools.wraps(stock._prepare_cache_for_generation)
    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
                                      **kwargs: Any) -> Any:
        """Stock's, but a call that is only asked about allocates no cache and leaves no mark on the caller's."""
        if paths.asked() is not None:
            if (given := model_kwargs.get(CACHE_NAME)) is None:
                return None
            model_kwargs[CACHE_NAME] = copy.copy(given)
        return stock._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)

    return _prepare_cache_for_generation


def _lockstep_beam_search(stock: Any) -> Callable:
    @functools.wraps(stock._beam_search)
    def _beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock_loop.beam_search(engine_of(self), stock._beam_search, self, *args, **kwargs)

    return _beam_search


def _paged_call(stock: Any) -> Callable:
    @functools.wraps(stock.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock's call, but where it carries a cache of the engine's, or where other ranks would not take part."""
        cache = kwargs.get(CACHE_NAME)
        if isinstance(cache, PagedCache):
            return cache.forward(kwargs["input_ids"], kwargs.get("logits_to_keep", 0))
        forward = ranks.own_forward(self)
        return stock.__call__(self, *args, **kwargs) if forward is None else forward(*args, **kwargs)

    return __call__
