"""Which log-probabilities a step has to bring, and where they go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hf_paged.runner.model_runner import StepHandle
from hf_paged.runner.prompt_scores import PromptSpan, Wanted
from hf_paged.scheduler import StepPlan
from hf_paged.session import Request


def wanted_by(plan: StepPlan, requests: Mapping[str, Request]) -> Wanted:
    """What the requests of a plan's rows ask for."""
    rows = [requests[sequence.request_id] for sequence in plan.sequences]
    spans = []
    for row in range(plan.num_decode_rows, len(rows)):
        if rows[row].awaits_prompt_logprobs:
            start, last = int(plan.start[row]), rows[row].sequence.num_prompt_tokens - 1
            count = min(int(plan.num_new_tokens[row]), last - start)
            if count > 0:
                spans.append(PromptSpan(row, start + 1, count))
    return Wanted(any(request.logprobs is not None for request in rows), tuple(spans))


def keep(plan: StepPlan, handle: StepHandle, accepted: np.ndarray, requests: Mapping[str, Request]) -> None:
    """Give the requests what a step brought: ``accepted`` are the rows whose token was taken."""
    if handle.logprobs is not None:
        logprobs = handle.logprobs.tolist()
        for row in accepted.tolist():
            request = requests.get(plan.sequences[row].request_id)
            if request is not None and request.logprobs is not None:
                request.logprobs.append(logprobs[row])
    if handle.prompt_logprobs is not None:
        values, end = handle.prompt_logprobs.tolist(), 0
        for row, first, count in handle.spans:
            begin, end = end, end + count
            request = requests.get(plan.sequences[row].request_id)
            # A sequence that ended in the meantime may have left its id to another.
            if request is not None and request.sequence is plan.sequences[row]:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs[first : first + count] = values[begin:end]
