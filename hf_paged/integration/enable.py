"""Enabling of models: a model gets an engine, which the hooks of transformers' methods look up; it is not changed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.config import PagedConfig, check_fields
from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration import hooks
from hf_paged.integration.engines import ENGINES
from hf_paged.models import SUPPORTED, find_executor
from hf_paged.parallel.group import group_of

_watched: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models whose finalizer may remove the hooks


def enable(model: nn.Module, config: PagedConfig | None = None, **overrides: Any) -> nn.Module:
    """Make `model.generate` run on a paged KV cache. The object, its class and its weights stay as they are.

    A `generate` attribute of the instance, and a bound method taken before, do not use the engine.

    Args:
        model: A causal LM of a supported family, or a PeftModel, a torch.compile'd or a DDP-wrapped one around it.
        config: Settings of the engine; None for the defaults.
        **overrides: Single fields of `PagedConfig`.

    Returns:
        `model` itself. A model that is enabled already gets a new engine if `config` or `overrides` are given.

    Raises:
        UnsupportedModelError (a TypeError): If there is no supported causal LM inside.
        ValueError, TypeError: If a field of the config is invalid; the error names it.
    """
    causal_lm = unwrap(model)
    settings = merged_config(config, overrides)
    if causal_lm in ENGINES and config is None and not overrides:
        hooks.place()  # another program may have restored a method
        return model
    if group_of(causal_lm).driven:
        raise ValueError("model: its other ranks follow the PagedGenerator that loaded it; give the settings to "
                         "PagedGenerator.from_pretrained")
    enable_with_engine(causal_lm, settings)
    return model


def merged_config(config: PagedConfig | None, overrides: dict[str, Any]) -> PagedConfig:
    """Apply `overrides` to `config`; raises TypeError for a name that is not a field."""
    if config is not None and not isinstance(config, PagedConfig):
        raise TypeError(f"config={config!r:.80}: expected a PagedConfig or None")
    check_fields(overrides)
    return dataclasses.replace(config or PagedConfig(), **overrides)


def enable_with_engine(causal_lm: PreTrainedModel, config: PagedConfig, **engine_options: Any) -> Engine:
    """Give an unwrapped model a new `Engine`."""
    engine = Engine(causal_lm, config, **engine_options)
    disable(causal_lm)
    with hooks.lock.rlock:
        if causal_lm not in _watched:
            _watched.add(causal_lm)
            weakref.finalize(causal_lm, hooks.put_back_if_unused).atexit = False
        ENGINES[causal_lm] = engine  # after the finalizer, so that Python removes the entry first
        hooks.place()
    return engine


@contextmanager
def as_if_enabled(causal_lm: PreTrainedModel) -> Iterator[Engine]:
    """Yield the engine that an unwrapped model has, or would have, with transformers' methods hooked.

    For `paths.asking`; other threads' calls of a model that is not enabled still run in stock.
    """
    with hooks.held():
        yield ENGINES.get(causal_lm) or Engine(causal_lm, PagedConfig())


def disable(model: nn.Module) -> nn.Module:
    """End the engine of a model; has no effect on a model that is not enabled.

    Disabling the last enabled model restores transformers' methods.

    Raises:
        UnsupportedModelError: If there is no causal LM inside.
    """
    causal_lm = unwrap(model)
    if causal_lm not in ENGINES:
        return model
    engine = ENGINES[causal_lm]
    try:
        engine.shutdown()
    finally:
        with hooks.lock.rlock:
            if ENGINES.get(causal_lm) is engine:  # not disabled by another thread in the meantime
                del ENGINES[causal_lm]
            hooks.put_back_if_unused()
    return model


def is_enabled(model: nn.Module) -> bool:
    """Return whether `model`, or the causal LM inside it, is enabled."""
    try:
        return unwrap(model) in ENGINES
    except UnsupportedModelError:
        return False


def get_engine(model: nn.Module) -> Engine:
    """Return the engine of an enabled model.

    Raises:
        ValueError: If the model is not enabled.
    """
    causal_lm = unwrap(model)
    if causal_lm not in ENGINES:
        raise ValueError(f"model={type(causal_lm).__name__}: expected a model that hf_paged.enable was called on")
    return ENGINES[causal_lm]


@contextmanager
def weight_update(model: nn.Module) -> Iterator[None]:
    """Open `Engine.weight_update` of an enabled model.

    Raises:
        ValueError: If the model is not enabled.
    """
    with get_engine(model).weight_update():
        yield


def unwrap(model: Any) -> PreTrainedModel:
    """Return the causal LM inside torch.compile's OptimizedModule, DDP and PEFT wrappers.

    Raises:
        UnsupportedModelError: If its class is not supported.
    """
    inner = innermost(model)
    if not isinstance(inner, PreTrainedModel) or (inner not in ENGINES and find_executor(inner) is None):
        inside = "" if inner is model else f" (with a {type(inner).__name__} inside)"
        raise UnsupportedModelError(
            f"model={type(model).__name__}{inside}: expected one of {', '.join(SUPPORTED)}, bare or wrapped"
        )
    return inner


def unsupported_class(causal_lm: Any) -> Reason | None:
    """Return why a model can never be enabled, or None."""
    if find_executor(causal_lm) is not None:
        return None
    return Reason(f"{type(causal_lm).__name__} is no class that the paged engine runs",
                  remedy=f"It runs in stock. The engine runs {', '.join(SUPPORTED)}.")


def innermost(model: Any) -> Any:
    """Return the object inside these wrappers, of any class."""
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
