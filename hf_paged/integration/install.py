"""Process-wide switch that enables every supported model at its first generation."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from hf_paged.config import PagedConfig
from hf_paged.errors import FallbackWarning
from hf_paged.integration import fallback, hooks
from hf_paged.integration.enable import disable, enable, is_enabled, merged_config, unsupported_class
from hf_paged.integration.paths import asked
from hf_paged.options.argument_warnings import level_of_caller
from hf_paged.process_lock import ProcessLock

_config = PagedConfig()
# Models enabled here, at most once each: a user may have disabled one on purpose.
_enabled: weakref.WeakSet[Any] = weakref.WeakSet()
_named: weakref.WeakSet[type] = weakref.WeakSet()  # unsupported classes for which the warning was shown
_enabling_one = ProcessLock()  # so that concurrent first calls of a model enable it once


def install(config: PagedConfig | None = None, **overrides: Any) -> None:
    """Enable every supported model at its first `generate`, `generate_batch` or `init_continuous_batching` from now on,
    for any caller (`transformers serve`, pipelines, TRL, lm-eval).

    Only these methods of `GenerationMixin` are hooked. Models that hf_paged does not support run in stock: a
    `FallbackWarning` names each such class once. A model that is disabled afterwards stays disabled. Another call
    changes the config of models enabled later.

    Args:
        config: Settings of the engines; None for the defaults.
        **overrides: Single fields of `PagedConfig`.

    Raises:
        ValueError, TypeError: If a field of the config is invalid; the error names it.
    """
    global _config
    _config = merged_config(config, overrides)
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
    for model in list(_enabled):
        disable(model)
    _enabled.clear()
    _named.clear()


def is_installed() -> bool:
    """Return whether `install` was called, and `uninstall` was not called since."""
    return enable_once in hooks.before_first_call


def enable_once(model: Any) -> None:
    """Enable a model if it is supported and was not enabled by this function before."""
    if model in _enabled or is_enabled(model) or fallback.fallback_engines() or asked() is not None:
        return  # within a fallback, a draft model belongs to the stock call
    if (reason := unsupported_class(model)) is not None:
        if type(model) not in _named:
            _named.add(type(model))
            text = f"hf_paged: {reason.with_remedy}"
            warnings.warn(text, FallbackWarning, stacklevel=level_of_caller())
        return
    with _enabling_one.rlock:
        if model not in _enabled:
            enable(model, _config)
            _enabled.add(model)
