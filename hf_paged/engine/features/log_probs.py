"""Log-probabilities of prompts and outputs: which of them a step computes, and which request gets them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import LastOutput, Likeliest, Request
from hf_paged.options.prompts import known_logprobs, known_top_logprobs
from hf_paged.runner.prompt_scores import PromptSpan, Wanted
from hf_paged.sampling.log_probs import RAW, TOPS, top_name
from hf_paged.scheduler import StepPlan


class LogProbs(StepFeature):
    """Requests with log-probabilities of their output, of their prompt, or of both."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: tuple[CommittedStep | None, dict[str, Any]] = None, {}  # a step, and its converted values by name

    def uses(self, request: Request) -> bool:
        return request.spec.logprobs is not None or request.spec.prompt_logprobs

    def admit(self, request: Request) -> None:
        spec, length, previous = request.spec, request.sequence.num_prompt_tokens, request.spec.previous
        request.logprobs_kind, request.top = spec.logprobs, _top_of(spec.logprobs, spec.top_logprobs)
        request.prompt_top = _top_of(RAW, spec.prompt_top_logprobs)
        if spec.logprobs:
            request.logprobs = [] if previous is None else known_logprobs(previous)
        if previous is not None:
            request.top_logprobs = known_top_logprobs(previous)
        if spec.prompt_logprobs:
            request.prompt_logprobs = [None] * length
        if request.prompt_top is not None:
            request.prompt_top_logprobs = [None] * length

    def start_over(self, request: Request, made: list[int]) -> None:
        self._cut(request, len(made))
        request.prompt_logprobs = None if request.prompt_logprobs is None else [None] * len(request.prompt_logprobs)

    def before(self, plan: StepPlan, wanted: Wanted) -> Wanted:
        spans: list[PromptSpan] = []
        for row in range(plan.num_decode_rows, len(plan.sequences)):
            if (request := self.of_row(plan, row)) is not None:
                span = self.attempt(request, self._span_to_score, request, plan, row)
                if span is not None:
                    spans.append(span)
        found = (self.of_row(plan, row) for row in range(len(plan.sequences)))
        rows = [request for request in found if request is not None]
        # Sorted, so that all ranks of a sharded model compute them, and add them up, in one order.
        names = {request.logprobs_kind for request in rows if request.logprobs_kind is not None}
        names |= {request.top.name for request in rows if request.top is not None}
        tops = [request.prompt_top for request in rows if request.prompt_top is not None] if spans else []
        widest = max(tops, key=lambda top: top.most).name if tops else None
        return Wanted(tuple(sorted(names)), tuple(spans), widest)

    def _span_to_score(self, request: Request, plan: StepPlan, row: int) -> PromptSpan | None:
        """Return the prompt tokens that a row scores, or None."""
        if not _awaits_prompt(request):
            return None
        start = int(plan.start[row])
        count = min(int(plan.num_new_tokens[row]), request.sequence.num_prompt_tokens - 1 - start)
        return PromptSpan(row, start + 1, count) if count > 0 else None

    def take(self, request: Request, step: CommittedStep, row: int) -> None:
        # The drawn token's log-probability first: the dict of the likeliest tokens contains it, too.
        if request.logprobs is not None and request.logprobs_kind is not None:
            request.logprobs.append(self._numbers(step, request.logprobs_kind)[row])
        if request.top is not None:
            assert request.logprobs is not None
            logprob = request.logprobs[len(request.top_logprobs)]
            assert logprob is not None
            found = self._numbers(step, request.top.name)[row]
            request.top_logprobs.append(request.top.dict_of(found, step.token_list[row], logprob))

    def _numbers(self, step: CommittedStep, name: str) -> Any:
        """Return the values of a step under a name of `LOGPROBS` or `TOPS`, by row."""
        if self._lists[0] is not step:
            self._lists = step, {}
        known = self._lists[1]
        if name not in known:
            values = step.handle.logprobs[name]
            known[name] = values.numpy() if name in TOPS else values.tolist()
        return known[name]

    def committed(self, step: CommittedStep, rows: list[int]) -> None:
        self._lists = None, {}
        handle, end = step.handle, 0
        if handle.prompt_logprobs is None:
            return
        scores = handle.prompt_logprobs.tolist()
        tops = None if handle.prompt_tops is None else handle.prompt_tops.numpy()
        for row, first, count in handle.spans:
            begin, end = end, end + count
            if (request := self.of_row(step.plan, row)) is not None:
                found = None if tops is None else tops[begin:end]
                self.attempt(request, self._take_prompt, request, first, scores[begin:end], found)

    def _take_prompt(self, request: Request, first: int, logprobs: list[float], found: np.ndarray | None) -> None:
        """Keep log-probabilities of prompt tokens from position ``first`` on; ``found`` [n, 2, width] has the likeliest
        tokens of these positions."""
        assert request.prompt_logprobs is not None
        places = slice(first, first + len(logprobs))
        request.prompt_logprobs[places] = logprobs
        if request.prompt_top is not None:
            assert found is not None
            tokens = request.sequence.prompt_token_ids[places]
            request.prompt_top_logprobs[places] = map(request.prompt_top.dict_of, found, tokens, logprobs)

    def stream(self, request: Request, step: CommittedStep, row: int, fields: dict[str, Any]) -> None:
        at = int(step.plan.start[row]) + int(step.plan.num_new_tokens[row]) - request.sequence.num_prompt_tokens
        if request.logprobs is not None:
            fields["new_logprobs"] = request.logprobs[at : at + 1]
        if request.top is not None:
            fields["new_top_logprobs"] = request.top_logprobs[at : at + 1]

    def complete(self, request: Request, last: LastOutput) -> None:
        if request.num_kept is not None:
            self._cut(request, request.num_kept)
        behind = len(last.token_ids) - len(last.fresh)
        last.completion |= {"logprobs": request.logprobs, "logprobs_kind": request.logprobs_kind}
        if request.logprobs is not None:
            last.output["new_logprobs"] = request.logprobs[behind:]
        if request.top is not None:
            last.completion["top_logprobs"] = request.top_logprobs
            last.output["new_top_logprobs"] = request.top_logprobs[behind:]
        if not _awaits_prompt(request):
            last.completion["prompt_logprobs"] = request.prompt_logprobs
            if request.prompt_top is not None:
                last.completion["prompt_top_logprobs"] = request.prompt_top_logprobs

    def _cut(self, request: Request, count: int) -> None:
        """Cut the log-probabilities of the output to its first ``count`` tokens."""
        request.logprobs = None if request.logprobs is None else request.logprobs[:count]
        request.top_logprobs = request.top_logprobs[:count]


def _awaits_prompt(request: Request) -> bool:
    """Return whether prompt tokens still have to be scored: the last one is scored last."""
    scores = request.prompt_logprobs
    return scores is not None and len(scores) > 1 and scores[-1] is None


def _top_of(kind: str | None, count: int | None) -> Likeliest | None:
    """Return the likeliest tokens that a request reports for a kind of `LOGPROBS`, or None."""
    return None if kind is None or count is None else Likeliest(top_name(kind, count), count)
