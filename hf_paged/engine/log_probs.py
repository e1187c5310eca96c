"""Which log-probabilities a step has to bring, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hf_paged.engine.session import Request
from hf_paged.runner.model_runner import StepHandle
from hf_paged.runner.prompt_scores import PromptSpan, Wanted
from hf_paged.sampling.top_log_probs import TOPS
from hf_paged.scheduler import StepPlan

# (request, its method, arguments): called so that an exception ends that request alone.
Attempt = Callable[..., None]


def wanted_by(plan: StepPlan, requests: Mapping[str, Request], attempt: Attempt) -> Wanted:
    """What the requests of a plan's rows ask for."""
    spans: list[PromptSpan] = []

    def ask(request: Request, row: int) -> None:
        span = request.span_to_score(row, int(plan.start[row]), int(plan.num_new_tokens[row]))
        if span is not None:
            spans.append(span)

    # Masks of the step before may have ended a decode row's request since the plan was made.
    rows = [requests[sequence.request_id] for sequence in plan.sequences if sequence.request_id in requests]
    for row in range(plan.num_decode_rows - len(plan.sequences), 0):
        attempt(rows[row], ask, rows[row], len(plan.sequences) + row)
    # Sorted: all ranks of a sharded model add them up in one order.
    names = {request.logprobs_kind for request in rows if request.logprobs_kind is not None}
    names |= {request.top.name for request in rows if request.top is not None}
    tops = [request.prompt_top for request in rows if request.prompt_top is not None] if spans else []
    widest = max(tops, key=lambda top: top.most).name if tops else None
    return Wanted(tuple(sorted(names)), tuple(spans), widest)


def keep(plan: StepPlan, handle: StepHandle, accepted: np.ndarray, tokens: np.ndarray,
         request_of: Callable[[StepPlan, int], Request | None], attempt: Attempt) -> None:
    """Give the requests what a step brought: ``accepted`` are the rows whose token, of ``tokens``, was taken."""
    for name, values in handle.logprobs.items():  # by name: a kind before the likeliest tokens of that kind
        known = values.numpy() if name in TOPS else values.tolist()
        for row in accepted.tolist():
            if (request := request_of(plan, row)) is None:
                continue
            if name in TOPS:
                attempt(request, request.take_top, name, known[row], int(tokens[row]))
            else:
                attempt(request, request.take_logprob, name, known[row])
    if handle.prompt_logprobs is not None:
        scores, end = handle.prompt_logprobs.tolist(), 0
        tops = None if handle.prompt_tops is None else handle.prompt_tops.numpy()
        for row, first, count in handle.spans:
            begin, end = end, end + count
            if (request := request_of(plan, row)) is not None:
                found = None if tops is None else tops[begin:end]
                attempt(request, request.take_prompt_logprobs, first, scores[begin:end], found)
