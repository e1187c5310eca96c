"""Requests as they are asked for and as they run, and the session of the caller who waits for them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged.engine.detokenizer import TextStream
from hf_paged.engine.stopping import StopRule
from hf_paged.options.settings import RequestSettings
from hf_paged.outputs import Completion, StepOutput
from hf_paged.runner.prompt_scores import PromptSpan
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence


@dataclass(frozen=True)
class NewRequest:
    """A request that is asked for: a checked prompt and all that is settled about it. None as the id: one is made.

    ``autocast``: the dtype to which its caller's forwards cast (`ModelExecutor.autocast_of_call`), or None.
    """

    prompt: list[int]
    settings: RequestSettings
    seed: int
    priority: int = 0
    stop: StopRule | None = None
    request_id: str | None = None
    autocast: torch.dtype | None = None


@dataclass
class Request:
    """One request of a session; `sequence` is replaced by a fresh one when the engine recovers from an interrupt.

    What a step does for one request alone is a method of this class, so that its exceptions are this request's: the
    engine core calls them through `EngineCore._attempt`.
    """

    sequence: Sequence
    parameters: SlotParameters
    session: Session
    text: TextStream | None = None
    stop: StopRule | None = None
    num_emitted: int = 0
    error: str | None = None
    logprobs: list[float] | None = None  # of the committed output, where asked for
    prompt_logprobs: list[float | None] | None = None  # None in it: not known yet, and for the first token for good
    thread: int = field(default_factory=threading.get_ident)  # whose caller waits for it

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """True while prompt tokens have to be scored; the last one is scored last."""
        scores = self.prompt_logprobs
        return scores is not None and len(scores) > 1 and scores[-1] is None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    def restart(self) -> None:
        """Forget the output made so far; what was emitted of it is not emitted again."""
        if self.stop is not None:
            self.stop.restart()  # first: where it raises, the output is still there
        old = self.sequence
        if self.text is not None:
            self.text.restart(old.output_token_ids[: self.num_emitted])
        self.sequence = Sequence(
            old.request_id,
            old.token_ids[: old.num_prompt_tokens],
            max_new_tokens=old.max_new_tokens,
            eos_token_ids=old.eos_token_ids,
            priority=old.priority,
            cache_key=old.cache_key,
            cache_salt=old.cache_salt,
            read_cache=old.read_cache,
        )
        self.error = None
        self.logprobs = None if self.logprobs is None else []
        self.prompt_logprobs = None if self.prompt_logprobs is None else [None] * len(self.prompt_logprobs)

    def span_to_score(self, row: int, start: int, num_new: int) -> PromptSpan | None:
        """Which prompt tokens a step scores that computes ``num_new`` tokens from position ``start`` on, if any."""
        if not self.awaits_prompt_logprobs:
            return None
        count = min(num_new, self.sequence.num_prompt_tokens - 1 - start)
        return PromptSpan(row, start + 1, count) if count > 0 else None

    def take_logprob(self, logprob: float) -> None:
        """Keep the log-probability of the token that was just committed."""
        if self.logprobs is not None:
            self.logprobs.append(logprob)

    def take_prompt_logprobs(self, first: int, logprobs: list[float]) -> None:
        """Keep those of prompt tokens from position ``first`` on."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[first : first + len(logprobs)] = logprobs

    def emit(self, token: int) -> None:
        """Hand a committed token to a session that streams."""
        done = self.sequence.finish_reason is not None
        if self.sequence.num_output_tokens <= self.num_emitted or done:
            return  # made again after a recovery, or part of the completion's own output
        text = self.text.push([token]) if self.text else None
        logprobs = None if self.logprobs is None else self.logprobs[-1:]
        output = StepOutput(self.request_id, [token], text, new_logprobs=logprobs)
        self.session.outbox.append(output)
        self.num_emitted += 1  # here: an interrupt before this line has the token made and handed out again

    def completed(self, tokenizer: Any) -> StepOutput:
        """The last output, of a sequence that the scheduler ended."""
        sequence = self.sequence
        token_ids = list(sequence.output_token_ids)
        fresh = token_ids[self.num_emitted :] if self.session.stream else token_ids
        reason = "error" if self.error is not None else sequence.finish_reason or "abort"
        error = self.error
        if reason == "error" and error is None:
            error = f"{sequence.num_tokens + 1} tokens do not fit into the KV pool alone"
        text = piece = None
        if tokenizer is not None and self.session.text and self.error is None:
            text = piece = tokenizer.decode(token_ids, skip_special_tokens=True)
        if self.text is not None and text is not None:
            piece = self.text.push(fresh) + self.text.finish(text)
        prompt_logprobs = None if self.awaits_prompt_logprobs else self.prompt_logprobs
        completion = Completion(
            token_ids=token_ids, text=text, finish_reason=reason, prompt_token_ids=sequence.prompt_token_ids,
            logprobs=self.logprobs, num_cached_tokens=sequence.num_cached_tokens, error=error,
            prompt_logprobs=prompt_logprobs,
        )
        logprobs = None if self.logprobs is None else self.logprobs[len(token_ids) - len(fresh) :]
        return StepOutput(self.request_id, fresh, piece, reason, completion, logprobs)


def failed_output(sequence: Sequence, num_emitted: int, error: str) -> StepOutput:
    """The last output of a request for which not even `Request.completed` can be asked."""
    token_ids = list(sequence.output_token_ids)
    completion = Completion(token_ids, None, "error", sequence.prompt_token_ids,
                            num_cached_tokens=sequence.num_cached_tokens, error=error)
    return StepOutput(sequence.request_id, token_ids[num_emitted:], None, "error", completion)


@dataclass(eq=False)
class Session:
    """With ``stream`` every token is delivered as it comes, otherwise only completions; ``text``: decoded, too."""

    stream: bool
    text: bool = True
    outbox: deque[StepOutput] = field(default_factory=deque)
    open: dict[str, Request] = field(default_factory=dict)

    def unfinished(self) -> bool:
        """True while a request is open or an output was not fetched."""
        return bool(self.open or self.outbox)
