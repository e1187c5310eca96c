"""Running requests, and the session of the caller who waits for their outputs."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hf_paged.engine.structured.matchers import Grammar, Matcher
from hf_paged.engine.text import PLAIN_ENDING, StopPolicy, TextStream
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import Completion, StepOutput, Timings, VersionRun, last_of
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import Sequence

NAN_ERROR = "the model's logits hold NaN, or no finite value to sample from"


class Likeliest(NamedTuple):
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

    spec: RequestSpec
    sequence: Sequence
    row: SlotRow
    session: Session
    features: tuple[Any, ...] = ()  # each `StepFeature` that the request uses
    text: TextStream | None = None
    grammar: Grammar | None = None
    matcher: Matcher | None = None  # of the grammar, with the committed output accepted
    # Whether the matcher accepted the token of the next commit, or what it raised; None if it has not seen the token.
    speculative_accept: bool | Exception | None = None
    num_emitted: int = 0  # output tokens that were handed out, those of `spec.previous` included
    error: str | None = None
    num_kept: int | None = None  # output tokens before the step in which the request failed; None if it did not fail
    logprobs: list[float | None] | None = None  # of the committed output; None if none are to be reported
    logprobs_kind: str | None = None  # the kind of log-probabilities of the output
    prompt_logprobs: list[float | None] | None = None  # an item is None until it is computed, the first one always
    top: Likeliest | None = None
    top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # with `top`, parallel to `logprobs`
    prompt_top: Likeliest | None = None
    prompt_top_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # parallel to `prompt_logprobs`
    ending: StopPolicy = PLAIN_ENDING
    draft_tokens: int = 0  # the most guesses of a step
    deadline: float | None = None  # of `time.monotonic`
    version_runs: list[VersionRun] = field(default_factory=list)  # of output tokens of earlier weights
    thread: int = field(default_factory=threading.get_ident)  # of the caller
    queued: float = field(default_factory=time.monotonic)  # this and the next two as in `Timings`
    started: float | None = None
    first_token: float | None = None

    @classmethod
    def of(cls, spec: RequestSpec, session: Session, *, vocab_size: int, max_model_len: int,
           on_weight_change: str) -> Request:
        """Return a request with its sequence and its row, which is not queued yet.

        Args:
            spec: with the request's id.
            vocab_size: number of token ids; those that end the request and lie beyond cannot occur.
            on_weight_change: as in `PagedConfig`; the value of requests that have none of their own.

        Raises:
            ValueError: settings that the device's tables cannot hold.
        """
        assert spec.request_id is not None
        length, previous = len(spec.prompt), spec.previous
        eos = tuple([token for token in spec.eos_token_ids if 0 <= token < vocab_size])
        row = SlotRow.of(
            spec, spec.edits, max_length=min(length + spec.max_new_tokens, max_model_len), seed=spec.seed,
            min_length=length + spec.min_new_tokens, eos_token_ids=eos, stop_token_ids=spec.stop_token_ids,
            prompt_length=length, adapter=spec.adapter_name, with_top=spec.top_logprobs is not None,
        )
        sequence = Sequence(
            spec.request_id, spec.prompt, max_new_tokens=spec.max_new_tokens,
            eos_token_ids=(*eos, *spec.stop_token_ids), priority=spec.priority, read_cache=not spec.prompt_logprobs,
            cache_salt=spec.cache_salt, adapter=spec.adapter_name,
            keeps_computed=(spec.on_weight_change or on_weight_change) == "keep",
            output_token_ids=() if previous is None else previous.token_ids, fed=spec.fed,
        )
        request = cls(spec, sequence, row, session, grammar=spec.grammar)
        if previous is not None:
            request.num_emitted = len(previous.token_ids)
        return request

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_open(self) -> bool:
        return self.session.open.get(self.request_id) is self

    def restart(self, made: list[int]) -> None:
        """Restart with a fresh sequence that keeps ``made``, the first tokens of the output, which were handed out."""
        old = self.sequence
        self.sequence = Sequence(
            old.request_id, old.token_ids[: old.num_prompt_tokens], max_new_tokens=old.max_new_tokens,
            eos_token_ids=old.eos_token_ids, priority=old.priority, read_cache=old.read_cache, cache_key=old.cache_key,
            cache_salt=old.cache_salt, adapter=old.adapter, keeps_computed=old.keeps_computed, output_token_ids=made,
            fed=old.fed,
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
            num_cached_tokens=sequence.num_cached_tokens, error=last.error, seed=self.spec.seed,
            timings=Timings(self.queued, self.started, self.first_token, time.monotonic()),
            has_images=sequence.fed is not None, **last.completion,
        )
        return StepOutput(self.request_id, last.fresh, finish_reason=last.reason, completion=completion, **last.output)


def failed_output(sequence: Sequence, num_emitted: int, error: str) -> StepOutput:
    """Return the last output of a request whose `Request.completed` raised."""
    token_ids = list(sequence.output_token_ids)
    completion = Completion(token_ids, None, "error", sequence.prompt_token_ids,
                            num_cached_tokens=sequence.num_cached_tokens, error=error,
                            version_runs=last_of([VersionRun(None, len(token_ids))], len(token_ids)),
                            has_images=sequence.fed is not None)
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
        """Return the last output and its ``num_emitted`` if it is this request's and is in the outbox; else None."""
        if self.last is None or self.last[0] is not request or all(one is not self.last[1] for one in self.outbox):
            return None
        return self.last[1:]

    def unfinished(self) -> bool:
        """Return whether a request is open or an output waits in the outbox."""
        return bool(self.open or self.outbox)
