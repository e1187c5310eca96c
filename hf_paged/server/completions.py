"""Answers of the chat and the completions endpoint, whole and streamed, in OpenAI's format."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from hf_paged.outputs import Completion, StepOutput
from hf_paged.server.choices import Choice, Piece, ReasoningText, ScoredToken, ToolCall
from hf_paged.server.errors import DONE, event, failed_event
from hf_paged.server.generation import Generation
from hf_paged.server.protocol import CompletionBody, RequestBody, TextBody


class Answer:
    """An answer with the choices of one or several prompts.

    Args:
        request_id, model_id: ids in the answer.
        generations: one for each prompt; their choices have indexes in order.
    """

    def __init__(self, request_id: str, model_id: str, body: RequestBody, generations: list[Generation]) -> None:
        self._id, self._model_id, self._generations = request_id, model_id, generations
        self._choices = [Choice(one) for one in generations for _ in range(one.count)]

    async def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; raises what `Generation.outputs` raises."""
        done: dict[int, Completion] = {}
        async for outputs in all_outputs(self._generations, stream=False):
            done |= {index: output.completion for index, output in outputs if output.completion is not None}
        return self._whole([done[index] for index in range(len(self._choices))])

    async def streamed(self) -> AsyncIterator[str]:
        """Return the server-sent events, once the first token has come; raises what `Generation.outputs` raises."""
        return self._events(await begun(all_outputs(self._generations, stream=True)))

    @property
    def _num_prompt_tokens(self) -> int:
        """The tokens of the prompts; one counts once for all its choices."""
        return sum(len(one.prompt.ids) for one in self._generations)

    # -- of an endpoint -----------------------------------------------------------------------------------------------

    _whole: Callable[[list[Completion]], dict[str, Any]]
    _events: Callable[[AsyncIterator[list[tuple[int, StepOutput]]]], AsyncIterator[str]]


class CompletionAnswer(Answer):
    """An answer of the chat or the completions endpoint."""

    kind: str  # of the body's `object`
    chunk_kind: str

    def __init__(self, request_id: str, model_id: str, body: CompletionBody, generations: list[Generation]) -> None:
        super().__init__(request_id, model_id, body, generations)
        self._body = body
        self._head = {"id": request_id, "created": int(time.time()), "model": model_id}

    def _whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = []
        for index, (choice, completion) in enumerate(zip(self._choices, completions, strict=True)):
            choices.append({"index": index, **self._whole_choice(index, choice, completion)})
            if self._body.with_logprobs:
                choices[-1]["logprobs"] = self._logprobs(index, choice.scored(completion))
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(num_tokens)}

    async def _events(self, all_of_it: AsyncIterator[list[tuple[int, StepOutput]]]) -> AsyncIterator[str]:
        num_tokens, num_ended = 0, 0
        opening = "".join(self._event([chunk]) for index, choice in enumerate(self._choices)
                          for chunk in [*self._opening(index), *self._chunks(index, Piece(choice.begin()))])
        if opening:
            yield opening
        try:
            async for outputs in all_of_it:
                events: list[str] = []
                for index, output in outputs:
                    piece = self._choices[index].push(output)
                    num_tokens += piece.num_tokens
                    events += [self._event([chunk]) for chunk in self._chunks(index, piece)]
                    if piece.finish_reason is not None:
                        num_ended += 1
                        is_over = num_ended == len(self._choices)
                        last = {"index": index, **self._last(), "finish_reason": piece.finish_reason}
                        events.append(self._event([last], **({"usage": self._usage(num_tokens)} if is_over else {})))
                if events:
                    yield "".join(events)
        except Exception as error:
            yield failed_event(error)
        else:
            if (options := self._body.stream_options) is not None and options.include_usage:
                yield self._event([], usage=self._usage(num_tokens))
        yield DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._head, "object": self.chunk_kind, "choices": choices, **more})

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompts = self._num_prompt_tokens
        return {"prompt_tokens": prompts, "completion_tokens": num_tokens, "total_tokens": prompts + num_tokens}

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        items = piece.items or ([""] if piece.tokens else [])
        chunks = [{"index": index, **self._part(index, item)} for item in items]
        if piece.tokens:
            chunks[0]["logprobs"] = self._logprobs(index, piece.tokens)
        return chunks

    # -- of an endpoint -----------------------------------------------------------------------------------------------

    _whole_choice: Callable[[int, Choice, Completion], dict[str, Any]]
    _opening: Callable[[int], list[dict[str, Any]]]  # the chunks before the first token
    _part: Callable[[int, Any], dict[str, Any]]  # of a chunk, with an item of a piece
    _logprobs: Callable[[int, list[ScoredToken]], dict[str, Any]]
    _last: Callable[[], dict[str, Any]]  # of the chunk with a finish reason


class ChatAnswer(CompletionAnswer):
    """An answer of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_calls = [0] * len(self._choices)

    def _whole_choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        made = choice.message(completion)
        message: dict[str, Any] = {"role": "assistant", "content": made.content}
        if made.reasoning is not None:
            message["reasoning_content"] = made.reasoning
        if made.calls:
            message["tool_calls"] = [self._call(number, call) for number, call in enumerate(made.calls)]
        return {"message": message, "finish_reason": made.finish_reason}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"role": "assistant"}}]

    def _last(self) -> dict[str, Any]:
        return {"delta": {}}

    def _part(self, index: int, item: Any) -> dict[str, Any]:
        if isinstance(item, ToolCall):
            number = self._num_calls[index]
            self._num_calls[index] += 1
            return {"delta": {"tool_calls": [{"index": number, **self._call(number, item)}]}}
        return {"delta": {"reasoning_content" if isinstance(item, ReasoningText) else "content": item}}

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        return {"id": f"{self._id}_tool_call_{number}", "type": "function",
                "function": {"name": call.name, "arguments": call.arguments}}

    def _logprobs(self, index: int, tokens: list[ScoredToken]) -> dict[str, Any]:
        def entry(text: str, logprob: float | None) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {"content": [{**entry(token.text, token.logprob),
                             "top_logprobs": [entry(*other) for other in token.likeliest]} for token in tokens],
                "refusal": None}


class TextAnswer(CompletionAnswer):
    """An answer of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request_id: str, model_id: str, body: TextBody, generations: list[Generation]) -> None:
        super().__init__(request_id, model_id, body, generations)
        self._suffix = body.suffix or ""
        decode = functools.partial(generations[0].served.tokenizer.decode, skip_special_tokens=True)
        self._prompts = [decode(one.prompt.ids) if body.echo else "" for one in generations for _ in range(one.count)]
        self._lengths = [0] * len(self._choices)  # of the texts of tokens so far that have log-probabilities

    def _whole_choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        text, reason = choice.text(completion)
        return {"text": self._prompts[index] + text + self._suffix, "finish_reason": reason}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "text": self._prompts[index]}] if self._prompts[index] else []

    def _part(self, index: int, item: Any) -> dict[str, Any]:
        return {"text": item}

    def _last(self) -> dict[str, Any]:
        return {"text": self._suffix}

    def _logprobs(self, index: int, tokens: list[ScoredToken]) -> dict[str, Any]:
        lengths = [len(token.text) for token in tokens]
        ends = list(itertools.accumulate(lengths, initial=self._lengths[index]))
        self._lengths[index] = ends[-1]
        return {"tokens": [token.text for token in tokens], "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [_by_text(token) for token in tokens] if any(one.likeliest for one in tokens) else None,
                "text_offset": ends[:-1]}


# -- outputs and events -----------------------------------------------------------------------------------------------


async def all_outputs(generations: list[Generation], *,
                      stream: bool) -> AsyncGenerator[list[tuple[int, StepOutput]], None]:
    """Yield the outputs of several prompts as they come, with the indexes of their choices."""
    arrived: asyncio.Queue[list[tuple[int, StepOutput]] | Exception | None] = asyncio.Queue()

    async def collect(generation: Generation) -> None:
        try:
            async for outputs in generation.outputs(stream=stream):
                arrived.put_nowait([(generation.first + index, output) for index, output in outputs])
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(collect(generation)) for generation in generations]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def begun(outputs: AsyncGenerator[list[tuple[int, StepOutput]], None]
                ) -> AsyncIterator[list[tuple[int, StepOutput]]]:
    """Wait for the first outputs, and return all; an error before them is raised here."""
    first = await anext(outputs)

    async def all_of_it() -> AsyncIterator[list[tuple[int, StepOutput]]]:
        async with aclosing(outputs):
            yield first
            async for more in outputs:
                yield more

    return all_of_it()


def _by_text(token: ScoredToken) -> dict[str, float] | None:
    """Map the texts of the likeliest tokens and the token itself to log-probabilities; the likelier of equal texts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*token.likeliest, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found
