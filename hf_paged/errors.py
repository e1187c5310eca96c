"""What goes wrong, by name."""

from __future__ import annotations


class UnsupportedModelError(TypeError):
    """The object handed to `enable` or `PagedGenerator` is no causal LM that hf_paged can run."""


class UnsupportedOptionError(ValueError):
    """A generation setting that the paged engine does not run natively; the message names it."""


class FallbackError(RuntimeError):
    """Raised with ``strict=True`` in place of a call going to stock `generate`; the message names the reason."""


class FallbackWarning(UserWarning):
    """A call went to stock `generate`; the message names the reason."""


class EngineClosedError(RuntimeError):
    """A request came to an engine whose model was disabled."""


class WorkerDiedError(RuntimeError):
    """A worker process of a tensor-parallel model ended on its own; the message names its rank and quotes it."""
