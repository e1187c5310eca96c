"""`hf_paged.explain`: finds the path of a call by running stock's preparation of it, without decoding."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration.enable import as_if_enabled, innermost, unsupported_class
from hf_paged.integration.fallback import outside_of_fallbacks
from hf_paged.integration.paths import Question, asked, asking
from hf_paged.outputs import Explanation
from hf_paged.process_lock import ProcessLock

_one_at_a_time = ProcessLock()  # filters of warnings are the process' own


class _Nobody:
    """Streamer without effect, for calls of `explain`."""

    def put(self, value: torch.Tensor) -> None:
        """Ignore the prompt, which stock streams before it decodes."""

    def end(self) -> None:
        """Do nothing; never called."""


def explain(model: nn.Module, **generate_kwargs: Any) -> Explanation:
    """Return the path, reasons and remedies of ``model.generate(**generate_kwargs)`` without running it.

    The model may be enabled or not (then the result is that after `enable(model)`). It is not changed; no cache is
    allocated, no random number drawn, no warning given. A `PagedGenerator` whose memory was released gets its KV pool
    back.

    Args:
        model: As for `enable`.
        **generate_kwargs: Arguments of the call. Without `inputs`, `input_ids` and `inputs_embeds` the prompt is one
            token, or one for each of `adapter_names`; a longer one, or padding, may lead to another path.

    Returns:
        The path, and each reason with its remedy.

    Raises:
        UnsupportedModelError (a TypeError): If there is no transformers model inside.
        Exception: Errors that `generate` raises about its arguments before it decodes.
    """
    causal_lm = innermost(model)
    if not isinstance(causal_lm, PreTrainedModel):
        raise UnsupportedModelError(f"model={type(model).__name__}: expected a transformers model, bare or wrapped")
    if (reason := unsupported_class(causal_lm)) is not None:
        return _explanation("stock", reason)
    if generate_kwargs.get("streamer") is not None:
        generate_kwargs["streamer"] = _Nobody()
    if generate_kwargs.keys().isdisjoint(("inputs", "input_ids", "inputs_embeds")):
        names = generate_kwargs.get("adapter_names")  # of PEFT's `generate`: one per row
        rows = max(1, len(names)) if isinstance(names, (list, tuple)) else 1
        generate_kwargs["input_ids"] = ids = torch.zeros((rows, 1), dtype=torch.int64, device=causal_lm.device)
        generate_kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with _one_at_a_time.rlock, as_if_enabled(causal_lm) as engine:
        question = Question(engine)
        caller: Any = model if hasattr(model, "generate") else causal_lm
        with asking(question), outside_of_fallbacks(), _quiet():
            caller.generate(**generate_kwargs)
    if question.answer is not None:
        return _explanation(question.answer.path, *question.answer.reasons)
    reason = Reason(f"the generate of {type(causal_lm).__name__} does not come to stock's decoding",
                    remedy="Call `GenerationMixin.generate`, or use a class that does not override it.")
    return _explanation("stock", reason)


def _explanation(path: str, *reasons: Reason) -> Explanation:
    by_kind = {reason.kind: reason for reason in reversed(reasons)}  # the first reason of each kind
    distinct = tuple(by_kind.pop(reason.kind) for reason in reasons if reason.kind in by_kind)
    return Explanation(path, distinct, tuple(reason.remedy for reason in distinct))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log messages of stock's preparation, which the real call will show."""
    names = [name for name in logging.Logger.manager.loggerDict if name.startswith("transformers.generation")]
    loggers = list(map(logging.getLogger, names))
    for logger in loggers:
        logger.addFilter(_not_asked)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_not_asked)


def _not_asked(record: logging.LogRecord) -> bool:
    return asked() is None  # in this thread
