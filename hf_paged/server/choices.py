"""One choice of an answer: the text, reasoning and tool calls that its tokens make, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.text import StopTexts, TextStream, cut
from hf_paged.server.wishes import Wishes


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer, as text, and its log-probability; with those of the likeliest tokens in its place."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What came of a choice: texts, and what transformers' parser makes of them; `tokens` where they are asked for."""

    index: int
    items: list[Any] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


class ChoiceStream:
    """Makes pieces of the outputs of one request.

    Args:
        index: of the choice in its answer.
        tokenizer: decodes the tokens.
        wishes: of the body.
        most: new tokens that the request may make; None: not known.
        parser: transformers' parser of a chat's answer, or None.

    Attributes:
        num_tokens: made so far.
        is_over: the last piece was made.
    """

    def __init__(self, index: int, tokenizer: Any, wishes: Wishes, most: int | None, parser: Any = None) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._most = most
        self._parser = parser
        self._logprobs, self._num_top = wishes.logprobs, wishes.top_logprobs or 0
        self._stream = TextStream(tokenizer, skip_special_tokens=parser is None)
        self._watch = StopTexts(wishes.stop, wishes.keeps_stop)
        self._calls_tools = False
        self.num_tokens = 0
        self.is_over = False

    def begin(self) -> list[Any]:
        """What the prompt begins of the answer."""
        return [] if self._parser is None else self._items(self._parser.initial_events)

    def push(self, output: GenerationOutput) -> Piece:
        """What this output of the request brings, which has all tokens so far."""
        if output.error is not None:
            self.is_over = True
            return Piece(self._index, error=str(output.error))
        new = output.generated_tokens[self.num_tokens :]
        scored = scored_tokens(self._tokenizer, output, self.num_tokens, self._num_top) if self._logprobs else []
        self.num_tokens += len(new)
        text, is_last = self._stream.push(new), output.is_finished()
        if is_last:
            whole = self._tokenizer.decode(output.generated_tokens, skip_special_tokens=self._parser is None)
            text += self._stream.finish(whole)
        text = self._watch.push(text)
        self.is_over = is_last or self._watch.is_met
        if self.is_over:
            text += self._watch.finish()
        items = self._read(text) + (self._last_items() if self.is_over else [])
        return Piece(self._index, items, scored, len(new), self._reason(output) if self.is_over else None)

    def _reason(self, output: GenerationOutput) -> str:
        if self._calls_tools:
            return "tool_calls"
        return finish_reason(output, self._watch.is_met, self._most)

    def _read(self, text: str) -> list[Any]:
        if not text:
            return []
        return [text] if self._parser is None else self._items(self._parser.feed(text))

    def _last_items(self) -> list[Any]:
        if self._parser is None:
            return []
        try:
            return self._items(self._parser.finalize()[1])
        except (ValueError, RuntimeError):  # it ended inside of a tool call, of which nothing is sent
            return []

    def _items(self, events: list[Any]) -> list[Any]:
        from transformers.cli.serving.utils import ToolCall, response_events_to_chunks

        items = response_events_to_chunks(events)
        self._calls_tools |= any(isinstance(item, ToolCall) for item in items)
        return items


def finish_reason(output: GenerationOutput, is_met: bool, most: int | None) -> str:
    """"stop" or "length". `model.generate` does not say how it ended: there the number of tokens does."""
    reason = getattr(output, "finish_reason", None)
    if is_met or reason in ("eos", "stop"):
        return "stop"
    hits_most = most is not None and len(output.generated_tokens) >= most
    return "length" if reason == "length" or hits_most else "stop"


def scored_tokens(tokenizer: Any, output: GenerationOutput, first: int, num_top: int) -> list[ScoredToken]:
    """Each token of an output from the ``first`` on by itself, with ``num_top`` of the likeliest in its place."""
    tokens, scores = output.generated_tokens[first:], output.logprobs[first:]
    tops = getattr(output, "top_logprobs", [])[first:] if num_top else [{}] * len(tokens)
    return [
        ScoredToken(tokenizer.decode([token]), score,
                    tuple((tokenizer.decode([other]), known) for other, known in [*top.items()][:num_top]))
        for token, score, top in zip(tokens, scores, tops, strict=True)
    ]


def whole_text(tokenizer: Any, tokens: list[int], wishes: Wishes, *, skip_special_tokens: bool) -> tuple[str, bool]:
    """The text of an answer without the stop text that ended it, and whether one did."""
    return cut(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens), wishes.stop, wishes.keeps_stop)
