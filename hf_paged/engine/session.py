"""New and running requests, and the session of the caller who waits for their outputs."""

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
    """A request to add: a checked prompt and its settings.

    ``request_id``: None has the engine make an id.
    ``made``: the checked output of an earlier request that this one continues, or None.
    ``grammar``: the compiled grammar of ``settings.structured``, or None if it is not compiled yet.
    ``autocast``: the dtype to which autocast of the caller casts (`ModelExecutor.autocast_of_call`), or None.
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
    """The number of likeliest tokens that a request reports (``most``), and the name in `TOPS` of the step's result."""

    name: str
    most: int

    def dict_of(self, found: np.ndarray, token: int, logprob: float) -> dict[int, float]:
        """Return log-probabilities by token id: the likeliest of ``found`` ([2, width] as in `Top`) and the token that
        stands at this position."""
        scores, ids = found[:, : self.most].tolist()
        known = {int(i): score for i, score in zip(ids, scores, strict=True) if score > -math.inf}
        known[token] = logprob
        return known


@dataclass
class LastOutput:
    """The last output of a request, which features may change before it is handed out.

    Attributes:
        token_ids: the whole output.
        fresh: the last tokens of the output, which were not handed out yet.
        reason: the `finish_reason`.
        error: the error message of a request that failed, or None.
        completion, output: further fields of the `Completion`, and of the `StepOutput` that contains it.
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

    Each feature sets and reads its own fields, which keep their defaults if the request does not use the feature.
    """

    sequence: Sequence
    settings: RequestSettings
    parameters: SlotParameters
    session: Session
    features: tuple[Any, ...] = ()  # each `StepFeature` that the request uses
    text: TextStream | StopStringBuffer | None = None
    stop: StopRule | None = None
    made: PreviousOutput | None = None  # the output of an earlier request that this one continues
    grammar: Grammar | None = None
    matcher: Matcher | None = None  # of the grammar, with the committed output accepted
    # Whether the matcher accepted the token of the next commit, or what it raised; None if it has not seen the token.
    speculative_accept: bool | Exception | None = None
    num_emitted: int = 0  # output tokens that were handed out, those of `made` included
    error: str | None = None
    num_kept: int | None = None  # output tokens before the step in which the request failed; None if it did not fail
    logprobs: list[float | None] | None = None  # of the committed output; None if the settings have none
    logprobs_kind: str | None = None  # the kind of log-probabilities of the output
    prompt_logprobs: list[float | None] | None = None  # an item is None until it is computed, the first one always
    top: TopAsked | None = None
    top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # with `top`, parallel to `logprobs`
    prompt_top: TopAsked | None = None
    prompt_top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # parallel to `prompt_logprobs`
    ending: StopPolicy = PLAIN_ENDING
    draft_tokens: int = 0  # the most guesses of a step
    deadline: float | None = None  # of `time.monotonic`
    version_runs: list[VersionRun] = field(default_factory=list)  # of output tokens of earlier weights
    thread: int = field(default_factory=threading.get_ident)  # of the caller
    queued: float = field(default_factory=time.monotonic)  # this and the next two as in `Timings`
    started: float | None = None
    first_token: float | None = None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_open(self) -> bool:
        """Whether the request is open in its session."""
        return self.session.open.get(self.request_id) is self

    def restart(self, made: list[int]) -> None:
        """Restart with a fresh sequence that keeps ``made``, the first tokens of the output: they were handed out, and
        other weights would generate others."""
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
        """Return the last output of a request whose sequence the scheduler has ended."""
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
    """Return the last output of a request whose `Request.completed` raised."""
    token_ids = list(sequence.output_token_ids)
    completion = Completion(token_ids, None, "error", sequence.prompt_token_ids,
                            num_cached_tokens=sequence.num_cached_tokens, error=error,
                            version_runs=last_of([VersionRun(None, len(token_ids))], len(token_ids)))
    fresh = token_ids[num_emitted:]
    return StepOutput(sequence.request_id, fresh, None, "error", completion,
                      version_runs=last_of(completion.version_runs, len(fresh)))


def copy_ids(request_id: str | None, copies: int) -> list[str | None]:
    """Return an id for each of the ``copies`` requests that ``num_return_sequences`` makes of one prompt."""
    if request_id is None or copies == 1:
        return [request_id] * copies
    return [f"{request_id}#{copy}" for copy in range(copies)]


def is_copy(request_id: str, of: str) -> bool:
    """Return whether ``request_id`` is one of the ids that `copy_ids` makes of the id ``of``."""
    start, number = request_id[: len(of) + 1], request_id[len(of) + 1 :]
    return start == f"{of}#" and number.isdecimal()


@dataclass(eq=False)
class Session:
    """The requests of one caller and the outputs that wait for that caller.

    With ``stream`` each token is handed out when it is committed, otherwise only completions; ``text``: with text.
    """

    stream: bool
    text: bool = True
    outbox: deque[StepOutput] = field(default_factory=deque)
    open: dict[str, Request] = field(default_factory=dict)
    last: tuple[object, StepOutput, int] | None = None  # as of `hand_out`

    def hand_out(self, request: object, output: StepOutput, num_emitted: int) -> None:
        """Append an output to the outbox. ``num_emitted``: tokens of the request handed out, this output included."""
        self.last = request, output, num_emitted  # set first: after an interrupt, `last_of` checks the outbox
        self.outbox.append(output)

    def last_of(self, request: object) -> tuple[StepOutput, int] | None:
        """Return the last output and its ``num_emitted`` if it belongs to this request and is in the outbox; else None.
        """
        if self.last is None or self.last[0] is not request or all(one is not self.last[1] for one in self.outbox):
            return None
        return self.last[1:]

    def unfinished(self) -> bool:
        """Return whether a request is open or an output waits in the outbox."""
        return bool(self.open or self.outbox)
