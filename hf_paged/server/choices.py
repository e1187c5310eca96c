"""Text, reasoning, tool calls and log-probabilities of one choice, made from its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.text import StopTexts, TextStream, cut
from hf_paged.server.server_request import ServerRequest


@dataclass(frozen=True)
class ScoredToken:
    """Token of an answer as text, with log-probabilities of it and of the likeliest tokens at its position."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Part of a choice: `items` are texts or what transformers' parser returns; `tokens` if the body has logprobs."""

    index: int
    items: list[Any] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


class ChoiceStream:
    """Converts the outputs of one request into pieces of its choice.

    Args:
        index: Index of the choice in its answer.
        tokenizer: Decodes the tokens.
        wishes: The parsed body.
        most: Maximum number of new tokens; None if unknown.
        parser: transformers' parser of a chat answer, or None.

    Attributes:
        num_tokens: Number of tokens received so far.
        is_over: True after the last piece.
    """

    def __init__(self, index: int, tokenizer: Any, wishes: ServerRequest, most: int | None, parser: Any = None) -> None:
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
        """Return the items that the prompt already opens, such as a reasoning block."""
        return [] if self._parser is None else self._items(self._parser.initial_events)

    def push(self, output: GenerationOutput) -> Piece:
        """Return the new part of the choice; `output` holds all tokens so far."""
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
        except (ValueError, RuntimeError):  # the answer ended within a tool call, which cannot be parsed
            return []

    def _items(self, events: list[Any]) -> list[Any]:
        from transformers.cli.serving.utils import ToolCall, response_events_to_chunks

        items = response_events_to_chunks(events)
        self._calls_tools |= any(isinstance(item, ToolCall) for item in items)
        return items


def finish_reason(output: GenerationOutput, is_met: bool, most: int | None) -> str:
    """Return "stop" or "length"; an output of `model.generate` has no reason, so its token count decides."""
    reason = getattr(output, "finish_reason", None)
    if is_met or reason in ("eos", "stop"):
        return "stop"
    hits_most = most is not None and len(output.generated_tokens) >= most
    return "length" if reason == "length" or hits_most else "stop"


def scored_tokens(tokenizer: Any, output: GenerationOutput, first: int, num_top: int) -> list[ScoredToken]:
    """Decode each token from index ``first`` on, with the ``num_top`` likeliest tokens at its position."""
    tokens, scores = output.generated_tokens[first:], output.logprobs[first:]
    tops = getattr(output, "top_logprobs", [])[first:] if num_top else [{}] * len(tokens)
    return [
        ScoredToken(tokenizer.decode([token]), score,
                    tuple((tokenizer.decode([other]), known) for other, known in [*top.items()][:num_top]))
        for token, score, top in zip(tokens, scores, tops, strict=True)
    ]


def whole_text(tokenizer: Any, tokens: list[int], wishes: ServerRequest, *,
               skip_special_tokens: bool) -> tuple[str, bool]:
    """Return the text of an answer up to the stop string that ended it, and whether there was one."""
    return cut(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens), wishes.stop, wishes.keeps_stop)
