"""Requests as they are asked for and as they run, and the session of the caller who waits for them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.engine.matchers import Grammar, Matcher
from hf_paged.engine.stop_rules import StopRule
from hf_paged.engine.text import PLAIN_ENDING, StopPolicy, StopStringBuffer, TextStream
from hf_paged.options.continued import PreviousOutput
from hf_paged.options.settings import RequestSettings
from hf_paged.outputs import Completion, StepOutput, Timings, VersionRun, last_of
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence

NAN_ERROR = "the model's logits hold NaN, or no finite value to sample from"


@dataclass(frozen=True)
class NewRequest:
    """A request that is asked for: a checked prompt and all that is settled about it. None as the id: one is made.

    ``made``: the output that it goes on from, also checked; None: it begins.
    ``grammar``: what its tokens have to follow, where that is compiled already.
    ``autocast``: the dtype to which its caller's forwards cast (`ModelExecutor.autocast_of_call`), or None.
    """

    prompt: list[int]
    settings: RequestSettings
    seed: int
    priority: int = 0
    stop: StopRule | None = None
    request_id: str | None = None
    made: PreviousOutput | None = None
    grammar: Grammar | None = None
    autocast: torch.dtype | None = None


class TopAsked(NamedTuple):
    """``most`` of the likeliest tokens, which steps bring under this name of `TOPS`."""

    name: str
    most: int

    def dict_of(self, found: np.ndarray, token: int, logprob: float) -> dict[int, float]:
        """What a step found for one place, [2, width] as in `Top`, with the token that stands there."""
        scores, ids = found[:, : self.most].tolist()
        known = {int(i): score for i, score in zip(ids, scores, strict=True) if score > -math.inf}
        known[token] = logprob
        return known


@dataclass
class LastOutput:
    """The last output of a request in the making.

    Attributes:
        token_ids: the whole output.
        fresh: the end of it that the caller has not got yet.
        reason: the `finish_reason`.
        error: what went wrong, if anything did.
        completion, output: further fields of the `Completion` and of the `StepOutput` that has it.
    """

    token_ids: list[int]
    fresh: list[int]
    reason: str
    error: str | None
    completion: dict[str, Any] = field(default_factory=lambda: {"text": None})
    output: dict[str, Any] = field(default_factory=dict)


@dataclass
class Request:
    """One request of a session; `sequence` is replaced by a fresh one when the engine recovers from an interrupt.

    Features set and read the fields that are theirs; of a request that does not use them these stay as they are here.
    """

    sequence: Sequence
    settings: RequestSettings
    parameters: SlotParameters
    session: Session
    features: tuple[Any, ...] = ()  # each `StepFeature` that it uses
    text: TextStream | StopStringBuffer | None = None
    stop: StopRule | None = None
    made: PreviousOutput | None = None  # output that was there when it came
    grammar: Grammar | None = None
    matcher: Matcher | None = None  # of the grammar, behind the committed output
    # Whether the matcher accepted the token of the next commit, or what it raised; None if it has not seen the token.
    speculative_accept: bool | Exception | None = None
    num_emitted: int = 0  # of the output, that among it
    error: str | None = None
    num_kept: int | None = None  # output tokens before the step in which the request failed; None: it did not
    logprobs: list[float | None] | None = None  # of the committed output, where asked for
    logprobs_kind: str | None = None  # which ones
    prompt_logprobs: list[float | None] | None = None  # None in it: not known yet, and for the first token for good
    top: TopAsked | None = None
    top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # with `top`, as `logprobs`
    prompt_top: TopAsked | None = None
    prompt_top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # with it, as `prompt_logprobs`
    ending: StopPolicy = PLAIN_ENDING
    draft_tokens: int = 0  # guesses of a step, at most
    deadline: float | None = None  # of `time.monotonic`
    version_runs: list[VersionRun] = field(default_factory=list)  # of the output, but for what the present weights made
    thread: int = field(default_factory=threading.get_ident)  # whose caller waits for it
    queued: float = field(default_factory=time.monotonic)  # this and the next two as in `Timings`
    started: float | None = None
    first_token: float | None = None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_open(self) -> bool:
        """Does its session wait for it?"""
        return self.session.open.get(self.request_id) is self

    def restart(self, made: list[int]) -> None:
        """Begin again behind the first tokens of the output, which stay: other weights would make other ones."""
        old = self.sequence
        self.sequence = Sequence(
            old.request_id,
            old.token_ids[: old.num_prompt_tokens],
            max_new_tokens=old.max_new_tokens,
            eos_token_ids=old.eos_token_ids,
            priority=old.priority,
            cache_key=old.cache_key,
            cache_salt=old.cache_salt,
            read_cache=old.read_cache,
            keeps_computed=old.keeps_computed,
            output_token_ids=made,
            adapter=old.adapter,
        )
        self.error = self.num_kept = None

    def completed(self) -> StepOutput:
        """The last output, of a sequence that the scheduler ended."""
        sequence, error = self.sequence, self.error
        token_ids = list(sequence.output_token_ids)[: self.num_kept]
        reason = "error" if error is not None else sequence.finish_reason or "abort"
        if reason == "error" and error is None:
            error = f"{sequence.num_tokens + 1} tokens do not fit into the KV pool alone"
        last = LastOutput(token_ids, token_ids[self.num_emitted :], reason, error)
        for feature in self.features:
            if "complete" in feature.hooks:
                feature.complete(self, last)
        completion = Completion(
            token_ids=token_ids, finish_reason=last.reason, prompt_token_ids=sequence.prompt_token_ids,
            num_cached_tokens=sequence.num_cached_tokens, error=last.error, seed=self.parameters.seed,
            timings=Timings(self.queued, self.started, self.first_token, time.monotonic()), **last.completion,
        )
        return StepOutput(self.request_id, last.fresh, finish_reason=last.reason, completion=completion, **last.output)


def failed_output(sequence: Sequence, num_emitted: int, error: str) -> StepOutput:
    """The last output of a request for which not even `Request.completed` can be asked."""
    token_ids = list(sequence.output_token_ids)
    completion = Completion(token_ids, None, "error", sequence.prompt_token_ids,
                            num_cached_tokens=sequence.num_cached_tokens, error=error,
                            version_runs=last_of([VersionRun(None, len(token_ids))], len(token_ids)))
    fresh = token_ids[num_emitted:]
    return StepOutput(sequence.request_id, fresh, None, "error", completion,
                      version_runs=last_of(completion.version_runs, len(fresh)))


def copy_ids(request_id: str | None, copies: int) -> list[str | None]:
    """Ids of the requests of one prompt, of which there are several with ``num_return_sequences``."""
    if request_id is None or copies == 1:
        return [request_id] * copies
    return [f"{request_id}#{copy}" for copy in range(copies)]


def is_copy(request_id: str, of: str) -> bool:
    """Is this an id that `copy_ids` makes of the other?"""
    start, number = request_id[: len(of) + 1], request_id[len(of) + 1 :]
    return start == f"{of}#" and number.isdecimal()


@dataclass(eq=False)
class Session:
    """With ``stream`` every token is delivered as it comes, otherwise only completions; ``text``: decoded, too."""

    stream: bool
    text: bool = True
    outbox: deque[StepOutput] = field(default_factory=deque)
    open: dict[str, Request] = field(default_factory=dict)
    last: tuple[object, StepOutput, int] | None = None  # as of `hand_out`

    def hand_out(self, request: object, output: StepOutput, num_emitted: int) -> None:
        """Have an output wait for the caller. ``num_emitted``: tokens of the request that the caller has then."""
        self.last = request, output, num_emitted  # first: after an interrupt `last_of` tells whether it waits here
        self.outbox.append(output)

    def last_of(self, request: object) -> tuple[StepOutput, int] | None:
        """The last output, if it is this request's and was not fetched, and how many tokens the caller has with it."""
        if self.last is None or self.last[0] is not request or all(one is not self.last[1] for one in self.outbox):
            return None
        return self.last[1:]

    def unfinished(self) -> bool:
        """True while a request is open or an output was not fetched."""
        return bool(self.open or self.outbox)
