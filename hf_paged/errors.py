"""What goes wrong, by name."""

from __future__ import annotations

from typing import Any


class Reason(str):
    """Why something is not done natively, as a text, with what to change.

    Args:
        template: the text, in which each ``{}`` stands for one of `values`.
        remedy: one or more sentences.

    Attributes:
        kind: the text with … for the values. Reasons of one kind are one reason to whoever counts or warns.
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
        """The text and what to change, for messages."""
        return f"{self}. {self.remedy}"

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, str]]:  # of copies, which take over the kind
        return ("{}", str(self)), {"remedy": self.remedy}


class UnsupportedModelError(TypeError):
    """The object handed to `enable` or `PagedGenerator` is no causal LM that hf_paged can run."""


class PrecisionBusyError(UnsupportedModelError):
    """Requests that compute in another precision (under autocast, or without it) run at the same time.

    Attributes:
        reason: says which.
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
    """A worker process of a tensor-parallel model ended on its own; the message names its rank and quotes it."""


class RankAloneError(RuntimeError):
    """A rank of a model that is sharded by FSDP2 generated, and others did not; the message names them."""


class PartlyLoadedError(RuntimeError):
    """Loading weights ended half-way: the model holds new weights and old ones. Its cause is the error that ended it.

    Attributes:
        written: names of the tensors that were written, in their order.
    """

    def __init__(self, error: BaseException | str, written: tuple[str, ...]) -> None:
        super().__init__(f"{error} ({len(written)} tensors were written before, from {written[0]!r} to "
                         f"{written[-1]!r}: expected all weights to be loaded again)")
        self.written = written
