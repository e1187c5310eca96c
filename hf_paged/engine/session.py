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

from hf_paged.engine.detokenizer import TextStream
from hf_paged.engine.endings import PLAIN_ENDING, CutText, Ending
from hf_paged.engine.matchers import Grammar, Matcher
from hf_paged.engine.stopping import StopRule
from hf_paged.options.continued import Made
from hf_paged.options.settings import RequestSettings
from hf_paged.outputs import Completion, StepOutput, Timings, VersionRun, first_of, last_of
from hf_paged.runner.prompt_scores import PromptSpan
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence

BARRED = ("where other settings bar all that the grammar allows (min_new_tokens, bad_words_ids, suppress_tokens, or an "
          "eos_token_id that the form needs inside of it), leave them out")


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
    made: Made | None = None
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
class Request:
    """One request of a session; `sequence` is replaced by a fresh one when the engine recovers from an interrupt.

    What a step does for one request alone is a method of this class, so that its exceptions are this request's: the
    engine core calls them through `EngineCore._attempt`.
    """

    sequence: Sequence
    parameters: SlotParameters
    session: Session
    text: TextStream | CutText | None = None
    stop: StopRule | None = None
    made: Made | None = None  # output that was there when it came
    grammar: Grammar | None = None
    matcher: Matcher | None = None  # of the grammar, behind the committed output
    went_on: bool | Exception | None = None  # did it already accept the token that is committed next? None: not asked
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
    ending: Ending = PLAIN_ENDING
    draft_tokens: int = 0  # guesses of a step, at most
    deadline: float | None = None  # of `time.monotonic`
    version_runs: list[VersionRun] = field(default_factory=list)  # of the output, but for what the present weights made
    thread: int = field(default_factory=threading.get_ident)  # whose caller waits for it
    queued: float = field(default_factory=time.monotonic)  # this and the next two as in `Timings`
    started: float | None = None
    first_token: float | None = None

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """True while prompt tokens have to be scored; the last one is scored last."""
        scores = self.prompt_logprobs
        return scores is not None and len(scores) > 1 and scores[-1] is None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_open(self) -> bool:
        """Does its session wait for it?"""
        return self.session.open.get(self.request_id) is self

    def resume(self, max_model_len: int) -> str | None:
        """Begin behind `made`; the reason for which there is nothing to go on with, if so."""
        assert self.made is not None
        if not self.sequence.max_new_tokens:  # it has none, and its prompt is to be scored
            return None
        self._match_anew(self.made.token_ids)
        stops = self.stop is not None and self.stop.resume(self.made.token_ids)
        if self.text is not None:
            self.text.restart(self.made.token_ids)
        reason = self.sequence.reached_end(max_model_len)
        is_over = stops or (self.matcher is not None and self.matcher.is_over)
        return "stop" if reason is None and is_over else reason

    def restart(self) -> None:
        """Begin again behind what was emitted, which stays as it is: other weights would make other tokens."""
        old, count = self.sequence, self.num_emitted
        made = old.output_token_ids[:count]
        if self.stop is not None:  # first: where it raises, the output is still there
            self.stop.resume(made)
        self._match_anew(made)
        if self.text is not None:
            self.text.restart(made)
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
        self.version_runs = first_of(self.version_runs, count)
        self.logprobs = None if self.logprobs is None else self.logprobs[:count]
        self.top_logprobs = self.top_logprobs[:count]
        self.prompt_logprobs = None if self.prompt_logprobs is None else [None] * len(self.prompt_logprobs)

    def _match_anew(self, made: list[int]) -> None:
        """Let the matcher stand behind this output."""
        if self.grammar is not None:
            self.matcher, self.went_on = self.grammar.matcher(self.sequence.eos_token_ids), None
            for token in made:
                self.match(token)

    def match(self, token: int) -> None:
        """Go on in the grammar by a committed token.

        Raises:
            ValueError: the grammar does not allow it.
        """
        went_on, self.went_on = self.went_on, None
        if isinstance(went_on, Exception):
            raise went_on
        if self.matcher is not None and not (self.matcher.accept(token) if went_on is None else went_on):
            raise ValueError(f"structured: the grammar does not allow token {token} here; {BARRED}")

    @property
    def open_matcher(self) -> Matcher | None:
        """That by which the next token is chosen, if any."""
        is_lost = self.went_on is not None and self.went_on is not True
        return None if self.matcher is None or is_lost or self.matcher.is_over else self.matcher

    def span_to_score(self, row: int, start: int, num_new: int) -> PromptSpan | None:
        """Which prompt tokens a step scores that computes ``num_new`` tokens from position ``start`` on, if any."""
        if not self.awaits_prompt_logprobs:
            return None
        count = min(num_new, self.sequence.num_prompt_tokens - 1 - start)
        return PromptSpan(row, start + 1, count) if count > 0 else None

    def take_logprob(self, kind: str, logprob: float) -> None:
        """Keep the log-probability of the token that was just committed, if it is of the kind that was asked for."""
        if self.logprobs is not None and kind == self.logprobs_kind:
            self.logprobs.append(logprob)

    def take_top(self, name: str, found: np.ndarray, token: int) -> None:
        """As `take_logprob`, which went before, of the likeliest tokens in its place, [2, width] as in `Top`."""
        if self.top is not None and name == self.top.name:
            assert self.logprobs is not None
            logprob = self.logprobs[len(self.top_logprobs)]
            assert logprob is not None
            self.top_logprobs.append(self.top.dict_of(found, token, logprob))

    def take_prompt_logprobs(self, first: int, logprobs: list[float], found: np.ndarray | None) -> None:
        """Keep those of prompt tokens from position ``first`` on; ``found`` [n, 2, width]: the likeliest in their
        places."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[first : first + len(logprobs)] = logprobs
        if self.prompt_top is not None:
            assert found is not None
            tokens = self.sequence.prompt_token_ids[first : first + len(logprobs)]
            self.prompt_top_logprobs[first : first + len(logprobs)] = map(self.prompt_top.dict_of, found, tokens,
                                                                          logprobs)

    def end_version_run(self, version: int) -> None:
        """All of the output whose version is not known yet was made with the weights of this one."""
        count = self.sequence.num_output_tokens - sum(run.num_tokens for run in self.version_runs)
        if count:
            self.version_runs.append(VersionRun(version, count))

    def emit(self, position: int, token: int, runs: tuple[VersionRun, ...]) -> None:
        """Hand a committed token of the sequence, and its version of the weights, to a session that streams."""
        if self.sequence.finish_reason is not None or self.error is not None:
            return  # part of the completion's own output, or of no output
        index = position - self.sequence.num_prompt_tokens
        text = self.text.push([token]) if self.text else None
        logprobs = None if self.logprobs is None else self.logprobs[index : index + 1]
        tops = None if self.top is None else self.top_logprobs[index : index + 1]
        output = StepOutput(self.request_id, [token], text, new_logprobs=logprobs, version_runs=runs,
                            new_top_logprobs=tops)
        self.session.hand_out(self, output, self.num_emitted + 1)
        self.num_emitted += 1

    def _drop_failed(self) -> None:
        """What is said of tokens that the output does not have."""
        if self.num_kept is not None:
            self.logprobs = None if self.logprobs is None else self.logprobs[: self.num_kept]
            self.top_logprobs = self.top_logprobs[: self.num_kept]
            self.version_runs = first_of(self.version_runs, self.num_kept)

    def completed(self, tokenizer: Any, version: int) -> StepOutput:
        """The last output, of a sequence that the scheduler ended while the weights were those of this version."""
        sequence = self.sequence
        self.end_version_run(version)
        self._drop_failed()
        token_ids = list(sequence.output_token_ids)[: self.num_kept]
        fresh = token_ids[self.num_emitted :]
        reason = "error" if self.error is not None else sequence.finish_reason or "abort"
        error = self.error
        if reason == "error" and error is None:
            error = f"{sequence.num_tokens + 1} tokens do not fit into the KV pool alone"
        text = piece = stop_reason = None
        tokenizer = tokenizer if self.session.text else None
        if tokenizer is not None and self.error is None:
            text = piece = self.ending.text(reason, token_ids, tokenizer)
        if self.text is not None and text is not None:
            piece = (self.text.push(fresh) if self.ending.keeps_stop else "") + self.text.finish(text)
        if self.ending is not PLAIN_ENDING:
            reason, stop_reason = self.ending.reason(reason, token_ids, tokenizer)
            if self.matcher is not None and self.matcher.is_over and not isinstance(stop_reason, int):
                stop_reason = None  # its grammar came to an end
        prompt_logprobs = None if self.awaits_prompt_logprobs else self.prompt_logprobs
        prompt_tops = None if self.awaits_prompt_logprobs or self.prompt_top is None else self.prompt_top_logprobs
        completion = Completion(
            token_ids=token_ids, text=text, finish_reason=reason, prompt_token_ids=sequence.prompt_token_ids,
            logprobs=self.logprobs, num_cached_tokens=sequence.num_cached_tokens, error=error,
            prompt_logprobs=prompt_logprobs, version_runs=tuple(self.version_runs),
            seed=self.parameters.seed, logprobs_kind=self.logprobs_kind,
            timings=Timings(self.queued, self.started, self.first_token, time.monotonic()), stop_reason=stop_reason,
            top_logprobs=None if self.top is None else self.top_logprobs, prompt_top_logprobs=prompt_tops,
        )
        behind = len(token_ids) - len(fresh)
        logprobs = None if self.logprobs is None else self.logprobs[behind:]
        return StepOutput(self.request_id, fresh, piece, reason, completion, logprobs,
                          last_of(completion.version_runs, len(fresh)),
                          None if self.top is None else self.top_logprobs[behind:])


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
