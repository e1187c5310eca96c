"""Text, reasoning, tool calls and log-probabilities of one choice, made from the outputs of its request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
    parse_assistant_message,
    response_events_to_chunks,
)

from hf_paged.engine.text import StopTexts
from hf_paged.outputs import Completion, StepOutput
from hf_paged.server.generation import Generation
from hf_paged.server.protocol import TextBody
from hf_paged.server.served_model import ServedModel

__all__ = ["ReasoningText", "ToolCall"]


@dataclass(frozen=True)
class ScoredToken:
    """Token of an answer as text, with log-probabilities of it and of the likeliest tokens at its position.

    ``logprob`` is None for the first token of a prompt.
    """

    text: str
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """New part of a choice: `items` are texts or what transformers' parser returns, `tokens` those with logprobs."""

    items: list[Any] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True)
class Message:
    """A whole answer of a chat."""

    content: str
    reasoning: str | None
    calls: list[ToolCall]
    finish_reason: str


class Choice:
    """Converts the outputs of one request into parts of its answer.

    Transformers parses an answer of a chat; the answer of the completions endpoint is a text.
    """

    def __init__(self, generation: Generation) -> None:
        self._served, self._body = generation.served, generation.body
        self._prompt = None if isinstance(generation.body, TextBody) else generation.prompt.ids
        self._watch = StopTexts(generation.body.stop_texts, keeps=True)
        self._calls_tools = False
        self._parser: Any = None

    # -- streamed -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Any]:
        """Return the items that the prompt already opens, such as a reasoning block."""
        if self._prompt is not None:
            self._parser = build_response_parser(self._served.processor, self._served.model, self._prompt,
                                                 **self._of_tools(build_response_parser))
        return [] if self._parser is None else self._items(self._parser.initial_events)

    def push(self, output: StepOutput) -> Piece:
        """Return the part of the choice that an output adds."""
        text, is_last = output.new_text or "", output.completion is not None
        if self._body.keeps_stop:
            text = self._watch.push(text) + (self._watch.finish() if is_last else "")
        items = self._read(text, is_last)
        tokens = self._scored(output.new_token_ids, output.new_logprobs, output.new_top_logprobs)
        reason = None if not is_last else "tool_calls" if self._calls_tools else self._reason(output.finish_reason)
        return Piece(items, tokens, len(output.new_token_ids), reason)

    def _read(self, text: str, is_last: bool) -> list[Any]:
        if self._parser is None:
            return [text] if text else []
        items = self._items(self._parser.feed(text)) if text else []
        if is_last:
            with suppress(ValueError, RuntimeError):  # the answer ended within a tool call, which cannot be parsed
                items += self._items(self._parser.finalize()[1])
        return items

    def _items(self, events: list[Any]) -> list[Any]:
        items = response_events_to_chunks(events)
        self._calls_tools |= any(isinstance(item, ToolCall) for item in items)
        return items

    # -- whole --------------------------------------------------------------------------------------------------------

    def text(self, completion: Completion) -> tuple[str, str]:
        """Return the whole text, and the finish reason; the text ends with a stop text that is kept."""
        text = completion.text or ""
        if self._body.keeps_stop:  # otherwise the engine has cut it
            text = self._watch.push(text) + self._watch.finish()
        return text, self._reason(completion.finish_reason)

    def message(self, completion: Completion) -> Message:
        """Return the whole answer of a chat; all text is content if transformers' parser cannot parse it."""
        text, reason = self.text(completion)
        try:
            content, reasoning, calls = parse_assistant_message(
                self._served.processor, self._served.model, text, input_ids=self._prompt, cleaned_content=text,
                **self._of_tools(parse_assistant_message))
        except (ValueError, RuntimeError):  # for example, the text ends within a tool call
            for mark in self._served.tokenizer.all_special_tokens:  # which the text has for the parser
                text = text.replace(mark, "")
            return Message(text, None, [], reason)
        return Message(content, reasoning, calls or [], "tool_calls" if calls else reason)

    def scored(self, completion: Completion) -> list[ScoredToken]:
        """Return the tokens with log-probabilities, those of the prompt first; without any that the body leaves out."""
        prompt = self._scored(completion.prompt_token_ids, completion.prompt_logprobs, completion.prompt_top_logprobs)
        return prompt + self._scored(completion.token_ids, completion.logprobs, completion.top_logprobs)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _reason(self, reason: str | None) -> str:
        """Return the reason of the API for a `Completion.finish_reason`."""
        return "length" if reason == "length" and not self._watch.is_met else "stop"

    def _scored(self, tokens: list[int], scores: Sequence[float | None] | None,
                tops: Sequence[dict[int, float] | None] | None) -> list[ScoredToken]:
        """Decode tokens, with as many of the likeliest tokens at each position as the body sets."""
        if scores is None:
            return []
        decode, most = self._served.tokenizer.decode, self._body.options().get("top_logprobs") or 0
        return [
            ScoredToken(decode([token]), score,
                        tuple((decode([other]), known) for other, known in [*(top or {}).items()][:most]))
            for token, score, top in zip(tokens, scores, tops or [None] * len(tokens), strict=True)
        ]

    def _of_tools(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the `tools` argument if `function` has one; transformers 5.17's parsers do not."""
        tools = self._body.callable_tools or None
        return {"tools": tools} if "tools" in inspect.signature(function).parameters else {}


def is_parsed(served: ServedModel) -> bool:
    """Return whether transformers parses the answers of chats, from a text with special tokens."""
    return get_response_template(served.processor, served.model) is not None
