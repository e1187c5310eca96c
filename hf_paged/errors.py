"""Errors, warnings, and the `Reason` for which a call or model is not run natively."""

from __future__ import annotations

from typing import Any


class Reason(str):
    """Text that says why a call or model is not run natively, with a remedy.

    Args:
        template: the text, in which each ``{}`` stands for one of `values`.
        remedy: what to change, in one or more sentences.

    Attributes:
        kind: the text with … for the values. Counters and warnings treat reasons of one kind as one reason.
        remedy: as given.
    """

    kind: str
    remedy: str

    def __new__(cls, template: str, *values: Any, remedy: str) -> Reason:
        reason = super().__new__(cls, template.format(*values))
        reason.kind, reason.remedy = template.format(*("…" for _ in values)), remedy
        return reason

    @property
    def with_remedy(self) -> str:
        """The text and the remedy, for messages."""
        return f"{self}. {self.remedy}"

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, str]]:  # unpickled copies keep the kind
        return ("{}", str(self)), {"remedy": self.remedy}


class UnsupportedModelError(TypeError):
    """The object handed to `enable` or `PagedGenerator` is no causal LM that hf_paged can run."""


class PrecisionBusyError(UnsupportedModelError):
    """Requests that compute in another precision (under autocast, or without it) run at the same time.

    Attributes:
        reason: names both precisions.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.with_remedy)
        self.reason = reason


class UnsupportedOptionError(ValueError):
    """A generation setting that the paged engine does not run natively; the message names it."""


class FallbackError(RuntimeError):
    """Raised with ``strict=True`` in place of a call going to stock `generate`; the message names the reason."""


class FallbackWarning(UserWarning):
    """A call went to stock `generate`; the message names the reason."""


class EngineClosedError(RuntimeError):
    """The generator was closed, or its model disabled, before a request came or while it ran."""


class WorkerDiedError(RuntimeError):
    """A worker process of a tensor-parallel model ended on its own; the message names its rank and quotes its error."""


class RankAloneError(RuntimeError):
    """A rank of a model that is sharded by FSDP2 generated, and other ranks did not; the message names these ranks."""


class PartlyLoadedError(RuntimeError):
    """Loading weights ended half-way: the model holds new and old weights. The exception's cause ended the loading.

    Attributes:
        written: names of the tensors that were written, in the order of writing.
    """

    def __init__(self, error: BaseException | str, written: tuple[str, ...]) -> None:
        super().__init__(f"{error} ({len(written)} tensors were written before, from {written[0]!r} to "
                         f"{written[-1]!r}: expected all weights to be loaded again)")
        self.written = written
