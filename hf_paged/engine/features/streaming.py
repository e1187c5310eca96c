"""Tokens that are handed out to a session when they are committed."""

from __future__ import annotations

from typing import Any

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import Request
from hf_paged.outputs import StepOutput


class Streaming(StepFeature):
    """Requests of sessions that stream."""

    def uses(self, request: Request) -> bool:
        return request.session.stream

    def take(self, request: Request, step: CommittedStep, row: int) -> None:
        sequence = request.sequence
        if sequence.finish_reason is not None or request.error is not None:
            return  # the token is part of the last output, or of none
        fields: dict[str, Any] = {}
        for feature in request.features:
            if "stream" in feature.hooks:
                feature.stream(request, step, row, fields)
        output = StepOutput(sequence.request_id, [step.token_list[row]], **fields)
        request.session.hand_out(request, output, request.num_emitted + 1)
        request.num_emitted += 1
