"""Process-wide switch: every supported model is enabled at its first generation."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from hf_paged.config import PagedConfig
from hf_paged.errors import FallbackWarning
from hf_paged.integration import fallback, hooks
from hf_paged.integration.enable import disable, enable, is_enabled, merged_config, unsupported_class
from hf_paged.integration.paths import asked
from hf_paged.options.notices import level_of_caller
from hf_paged.process_lock import ProcessLock

_config = PagedConfig()
# Enabled here once: a later `disable` of one is the user's wish.
_enabled: weakref.WeakSet[Any] = weakref.WeakSet()
_named: weakref.WeakSet[type] = weakref.WeakSet()  # classes that stay stock's, of which somebody was told
_enabling_one = ProcessLock()  # threads that meet in a model's first call: one enables it


def install(config: PagedConfig | None = None, **overrides: Any) -> None:
    """From now on a supported model is enabled at its first `generate`, `generate_batch` or
    `init_continuous_batching`, wherever it and its caller came from (`transformers serve`, pipelines, TRL, lm-eval).

    Only these methods of `GenerationMixin` are hooked. Models that hf_paged does not support stay stock's: a
    `FallbackWarning` names each such class once. A model that is disabled afterwards stays disabled. Installing again
    changes the config of models to come.

    Args:
        config: how to run; None: the defaults.
        **overrides: single fields of `PagedConfig`.

    Raises:
        ValueError, TypeError: a field of the config, named.
    """
    global _config
    _config = merged_config(config, overrides)
    with hooks.lock.rlock:
        if not is_installed():
            hooks.before_first_call.append(enable_once)
            hooks.hold()


def uninstall() -> None:
    """Put the methods back and disable what `install` enabled. Nothing happens where it is not installed.

    Raises:
        RuntimeError: one of the methods was replaced after `install`; undo that first.
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
    """True between `install` and `uninstall`."""
    return enable_once in hooks.before_first_call


def enable_once(model: Any) -> None:
    """Enable a model that is supported and was not enabled here before."""
    if model in _enabled or is_enabled(model) or fallback.fallback_engines() or asked() is not None:
        return  # inside a fallback: a draft model belongs to the stock call that runs it
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
