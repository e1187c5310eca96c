"""Requests whose output is returned as text, and the stop strings and special tokens that the text contains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import LastOutput, Request
from hf_paged.engine.text import PLAIN_ENDING, StopPolicy
from hf_paged.options.request_spec import RequestSpec


class Text(StepFeature):
    """Requests whose session has text, or whose settings have stop strings, stop tokens or other text options.

    Args:
        tokenizer: returns the engine's tokenizer, or None.
    """

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def uses(self, request: Request) -> bool:
        return request.session.text or not _is_plain(request.spec)

    def admit(self, request: Request) -> None:
        spec, tokenizer = request.spec, self._tokenizer()
        if not _is_plain(spec):
            own = tuple([token for token in spec.stop_token_ids if token not in spec.eos_token_ids])
            request.ending = StopPolicy(spec.stop_strings, own, spec.include_stop_str_in_output,
                                        spec.skip_special_tokens)
        if request.session.text and request.session.stream and tokenizer is not None:
            request.text = request.ending.stream(tokenizer)

    def start_over(self, request: Request, made: list[int]) -> None:
        if request.text is not None:
            request.text.restart(made)

    def stream(self, request: Request, step: CommittedStep, row: int, fields: dict[str, Any]) -> None:
        if request.text is not None:
            fields["new_text"] = request.text.push([step.token_list[row]])

    def complete(self, request: Request, last: LastOutput) -> None:
        ending, text = request.ending, None
        tokenizer = self._tokenizer() if request.session.text else None
        if tokenizer is not None and request.error is None:
            text = piece = ending.text(last.reason, last.token_ids, tokenizer)
            if request.text is not None:
                piece = (request.text.push(last.fresh) if ending.keeps_stop else "") + request.text.finish(text)
            last.completion["text"], last.output["new_text"] = text, piece
        if ending is not PLAIN_ENDING:
            last.reason, last.completion["stop_reason"] = ending.reason(last.reason, last.token_ids, tokenizer)


def _is_plain(spec: RequestSpec) -> bool:
    """Return whether a request's text ends as by `PLAIN_ENDING`."""
    return (not spec.stop_strings and not spec.stop_token_ids and spec.include_stop_str_in_output
            and spec.skip_special_tokens)
