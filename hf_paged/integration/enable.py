"""Enabling of models: a model gets an engine, which the hooks of transformers' methods look up; it is not changed.

`install` enables every supported model of the process at its first generation.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.config import PagedConfig, check_fields
from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackError, FallbackWarning, Reason, UnsupportedModelError
from hf_paged.integration import fallback, hooks
from hf_paged.integration.enabled import ENGINES
from hf_paged.integration.paths import asked
from hf_paged.integration.ranks import OTHERS_IN_STOCK, come, refusing
from hf_paged.models import why_no_executor
from hf_paged.models.routing.record import names_routers
from hf_paged.options.arguments import level_of_caller
from hf_paged.parallel.group import group_of
from hf_paged.process_lock import ProcessLock

_watched: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models whose finalizer may remove the hooks
_config_of_install = PagedConfig()
_replays_routes = False  # as of the last `install`
# Models that `install` enabled, at most once each: a user may have disabled one on purpose.
_enabled_by_install: weakref.WeakSet[Any] = weakref.WeakSet()
_warned_of: weakref.WeakSet[type] = weakref.WeakSet()  # unsupported classes for which the warning was shown
_enabling_one = ProcessLock()  # so that concurrent first calls of a model enable it once


def enable(model: nn.Module, config: PagedConfig | None = None, **overrides: Any) -> nn.Module:
    """Make `model.generate` run on a paged KV cache. The object, its class and its weights stay as they are.

    A class of no fused family is proved first, on small clones on the CPU: seconds, unless the proof is stored.

    A `generate` attribute of the instance, and a bound ``model.generate`` that was taken before any model was enabled,
    run in stock: neither looks the hooked method up.

    Args:
        model: A causal LM of a fused family or of a proved class, or a PeftModel, a torch.compile'd or a DDP-wrapped
            one around it.
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
    enable_with_engine(model, settings)
    return model


def merged_config(config: PagedConfig | None, overrides: dict[str, Any]) -> PagedConfig:
    """Apply `overrides` to `config`; raises TypeError for a name that is not a field."""
    if config is not None and not isinstance(config, PagedConfig):
        raise TypeError(f"config={config!r:.80}: expected a PagedConfig or None")
    check_fields(overrides)
    return dataclasses.replace(config or PagedConfig(), **overrides)


def enable_with_engine(model: nn.Module, config: PagedConfig, **engine_options: Any) -> Engine:
    """Give the causal LM in a model a new `Engine`."""
    causal_lm = _causal_lm_in(model)
    engine = Engine(causal_lm, config, **engine_options)
    engine.tuners.update(_tuners_around(model))
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

    For a question of `paths`; other threads' calls of a model that is not enabled still run in stock.
    """
    with hooks.held():
        yield ENGINES.get(causal_lm) or Engine(causal_lm, PagedConfig())


def disable(model: nn.Module) -> nn.Module:
    """End the engine of a model; has no effect on a model that is not enabled.

    Disabling the last enabled model restores transformers' methods.

    Raises:
        UnsupportedModelError: If there is no causal LM inside.
    """
    causal_lm = _causal_lm_in(model)
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
        return _causal_lm_in(model) in ENGINES
    except UnsupportedModelError:
        return False


def get_engine(model: nn.Module) -> Engine:
    """Return the engine of an enabled model.

    Raises:
        ValueError: If the model is not enabled.
    """
    causal_lm = _causal_lm_in(model)
    if causal_lm not in ENGINES:
        raise ValueError(f"model={type(causal_lm).__name__}: expected a model that hf_paged.enable was called on")
    engine = ENGINES[causal_lm]
    engine.tuners.update(_tuners_around(model))
    return engine


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
        UnsupportedModelError: If its class is not supported; the error says why.
    """
    inner = _causal_lm_in(model)
    if inner not in ENGINES and (reason := unsupported_class(inner, anew=True)) is not None:
        raise UnsupportedModelError(f"model={_name(model, inner)}: {reason.with_remedy}")
    return inner


def _causal_lm_in(model: Any) -> PreTrainedModel:
    """Return the causal LM inside of wrappers, of any class.

    Raises:
        UnsupportedModelError: If there is none.
    """
    inner = innermost(model)
    if not isinstance(inner, PreTrainedModel) or not inner.can_generate():
        raise UnsupportedModelError(f"model={_name(model, inner)}: expected a causal LM of transformers, "
                                    "Qwen3ForCausalLM for instance, bare or wrapped")
    return inner


def _name(model: Any, inner: Any) -> str:
    return type(model).__name__ + ("" if inner is model else f" (with a {type(inner).__name__} inside)")


def unsupported_class(causal_lm: Any, *, anew: bool = False) -> Reason | None:
    """Return why a model cannot be enabled, or None; ``anew``: proved again where it is not fused."""
    if not isinstance(causal_lm, PreTrainedModel) or not causal_lm.can_generate():
        return Reason("{} is no causal LM of transformers", type(causal_lm).__name__, remedy="It runs in stock.")
    return why_no_executor(causal_lm, anew=anew)


def innermost(model: Any) -> Any:
    """Return the object inside these wrappers, of any class."""
    *_, inner = _wrapped(model)
    return inner


def _wrapped(model: Any) -> Iterator[Any]:
    """Yield a model, and what each of these wrappers holds."""
    while True:
        yield model
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif _is_peft_model(model):
            model = model.get_base_model()
        else:
            return


def _is_peft_model(model: Any) -> bool:
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def _tuners_around(model: Any) -> list[Any]:
    """Return the PeftModels around a causal LM, and PEFT's tuners in them."""
    return [tuner for one in _wrapped(model) if _is_peft_model(one) for tuner in (one, one.base_model)
            if "active_adapter" in vars(tuner)]


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Let each rank generate natively and independently of the others within the context.

    For an enabled model that is sharded by FSDP2. All ranks enter the context, which gathers the weights if they
    changed; afterwards no rank waits for another, also at the end. Has no effect on any other model.

    Args:
        model: An enabled model, as for `get_engine`.

    Yields:
        `model`.

    Raises:
        ValueError: If the model is not enabled.
        RankAloneError: If not all ranks enter within `PagedConfig.gather_timeout`.
        FallbackError: If another rank's call goes to stock generate meanwhile, or if a call inside the context would.
        UnsupportedModelError: If the model cannot run natively in its current state.
    """
    engine = get_engine(model)
    if engine.finds_shards():
        with refusing(engine):
            engine.check_runnable()
    replica = engine.replica
    if replica is None:
        yield model
        return
    if not come(engine, replica):
        raise FallbackError(f"gathered: {OTHERS_IN_STOCK.with_remedy}")
    with replica.pinned(in_all_threads=True):
        yield model


def install(config: PagedConfig | None = None, *, replay_routes: bool = False, **overrides: Any) -> None:
    """Enable every supported model at its first `generate`, `generate_batch` or `init_continuous_batching` from now on,
    for any caller (`transformers serve`, pipelines, TRL, lm-eval).

    Only these methods of `GenerationMixin` are hooked. Models that hf_paged does not support run in stock: a
    `FallbackWarning` names each such class once. A model that is disabled afterwards stays disabled. Another call
    changes the config of models enabled later.

    Args:
        config: Settings of the engines; None for the defaults.
        replay_routes: Whether a trainer's forwards of models with experts take the experts that the rollouts took
            (`Engine.replay_routes`), which changes losses.
        **overrides: Single fields of `PagedConfig`.

    Raises:
        ValueError, TypeError: If a field of the config is invalid; the error names it.
    """
    global _config_of_install, _replays_routes
    _config_of_install, _replays_routes = merged_config(config, overrides), replay_routes
    with hooks.lock.rlock:
        if not is_installed():
            hooks.before_first_call.append(enable_once)
            hooks.hold()


def uninstall() -> None:
    """Restore the methods and disable what `install` enabled; has no effect if not installed.

    Raises:
        RuntimeError: If one of the methods was replaced after `install`; undo that first.
    """
    if is_installed():
        if (name := hooks.replaced()) is not None:
            raise RuntimeError(f"uninstall: GenerationMixin.{name} was replaced after install; undo that first")
        hooks.before_first_call.remove(enable_once)
        hooks.release()
    for model in list(_enabled_by_install):
        disable(model)
    _enabled_by_install.clear()
    _warned_of.clear()


def is_installed() -> bool:
    """Return whether `install` was called, and `uninstall` was not called since."""
    return enable_once in hooks.before_first_call


def enable_once(model: Any) -> None:
    """Enable a model if it is supported and was not enabled by this function before."""
    if model in _enabled_by_install or is_enabled(model) or fallback.in_fallback() or asked() is not None:
        return  # within a fallback, a draft model belongs to the stock call
    if (reason := unsupported_class(model) or unsupported_class(model, anew=True)) is not None:
        if type(model) not in _warned_of:
            _warned_of.add(type(model))
            text = f"hf_paged: {reason.with_remedy}"
            warnings.warn(text, FallbackWarning, stacklevel=level_of_caller())
        return
    with _enabling_one.rlock:
        if model not in _enabled_by_install:
            if not (_replays_routes and names_routers(model) and _enable_with_replay(model)):
                enable(model, _config_of_install)
            _enabled_by_install.add(model)


def _enable_with_replay(model: Any) -> bool:
    """Enable a model with experts for `install`; returns False, after a warning, if its routes are not recorded."""
    try:
        enable(model, _config_of_install, routed_experts=True)
    except ValueError as error:
        warnings.warn(f"hf_paged: routes are not replayed: {error}", FallbackWarning, stacklevel=level_of_caller())
        return False
    get_engine(model).replay_routes()
    return True
