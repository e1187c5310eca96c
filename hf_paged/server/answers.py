"""Answers of the chat and completions endpoints, whole and streamed, in OpenAI's format, with `n` choices."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.server.calls import RefusedRequestError, ServedCall
from hf_paged.server.choices import (
    ChoiceStream,
    Piece,
    ScoredToken,
    finish_reason,
    scored_tokens,
    whole_text,
)
from hf_paged.server.requests import ServedRequests

# Makes the request of one choice from its index and its own copy of the settings.
MakeRequest = Callable[[int, GenerationConfig], ServedRequests]


class Answer:
    """Answer with one engine request per choice; the requests share the prompt's cached blocks.

    Args:
        request_id, model_id: Ids in the answer.
        model: The causal LM.
        processor: The processor or tokenizer that decodes tokens.
        inputs: Inputs of the prompt, with ``input_ids`` as a list or as a tensor of one row.
        config: Settings of every choice.
        make: Makes the request of a choice.
        tools: Tools in the model's prompt.
    """

    def __init__(self, request_id: str, model_id: str, model: Any, processor: Any, inputs: Any,
                 config: GenerationConfig, make: MakeRequest, tools: Any = None) -> None:
        ids = inputs["input_ids"]
        self.call = ServedCall.current()
        self.wishes = self.call.wishes
        self._prompt: list[int] = ids if isinstance(ids, list) else ids[0].tolist()
        self._head = {"id": request_id, "created": int(time.time()), "model": model_id}
        self._model = model
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._config = config
        self._tools = tools
        self._requests = [make(index, copy.deepcopy(config)) for index in range(self.wishes.n or 1)]

    async def whole_chat(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; raises what `_outputs` raises."""
        return await self._whole("chat.completion", self._chat_choice)

    async def whole_text(self, suffix: str) -> dict[str, Any]:
        """Return a text completion's body, `suffix` after each choice; raises what `_outputs` raises."""
        return await self._whole("text_completion", lambda index, output: self._text_choice(index, output, suffix))

    def chat_stream(self) -> AsyncIterator[str]:
        """Return server-sent events; queues the requests before the first event is requested."""
        from transformers.cli.serving.utils import build_response_parser

        parsers = [build_response_parser(self._processor, self._model, self._prompt, **self._of_tools(
            build_response_parser)) for _ in self._requests]
        return self._events(self._pieces(parsers), ChatChunks(str(self._head["id"])), "chat.completion.chunk")

    def text_stream(self, suffix: str) -> AsyncIterator[str]:
        """Return server-sent events of a text completion; queues the requests like `chat_stream`."""
        return self._events(self._pieces([None] * len(self._requests)), TextChunks(suffix), "text_completion")

    # -- whole answers ------------------------------------------------------------------------------------------------

    async def _whole(self, kind: str, choice: Callable[[int, GenerationOutput], dict[str, Any]]) -> dict[str, Any]:
        outputs = await self._outputs()
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        choices = [choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(num_tokens)}

    async def _outputs(self) -> list[GenerationOutput]:
        """Return the last output of every choice.

        Raises:
            RefusedRequestError: If the request cannot be carried out.
            CBWorkerDeadError, RuntimeError: If generation failed.
        """
        from transformers.cli.serving.utils import CBWorkerDeadError

        loop = asyncio.get_running_loop()
        made: list[asyncio.Future[GenerationOutput]] = [loop.create_future() for _ in self._requests]

        def take(index: int, output: GenerationOutput) -> None:
            if output.is_finished() and not made[index].done():
                made[index].set_result(output)

        self._queue(False, take)
        outputs = list(await asyncio.gather(*made))
        for index, output in enumerate(outputs):
            if output.error is None:
                continue
            if self.call.refusal is not None:
                raise RefusedRequestError(self.call.refusal)
            kind = CBWorkerDeadError if self._requests[index].is_dead() else RuntimeError
            raise kind(f"generation failed for {self._head['id']}: {output.error}")
        return outputs

    def _chat_choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        text, is_met = self._cut(output)
        content, reasoning, calls = self._parsed(output, text)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_tool_call(str(self._head["id"]), i, call) for i, call in enumerate(calls)]
        reason = "tool_calls" if calls else finish_reason(output, is_met, self._config.max_new_tokens)
        choice = {"index": index, "message": message, "finish_reason": reason}
        return choice | ({"logprobs": _chat_logprobs(self._scored(output))} if self.wishes.logprobs else {})

    def _text_choice(self, index: int, output: GenerationOutput, suffix: str) -> dict[str, Any]:
        text, is_met = self._cut(output)
        reason = finish_reason(output, is_met, self._config.max_new_tokens)
        choice = {"index": index, "text": text + suffix, "finish_reason": reason}
        return choice | ({"logprobs": _text_logprobs(self._scored(output), 0)} if self.wishes.logprobs else {})

    def _scored(self, output: GenerationOutput) -> list[ScoredToken]:
        return scored_tokens(self._tokenizer, output, 0, self.wishes.top_logprobs or 0)

    def _cut(self, output: GenerationOutput) -> tuple[str, bool]:
        return whole_text(self._processor, output.generated_tokens, self.wishes, skip_special_tokens=True)

    def _parsed(self, output: GenerationOutput, text: str) -> tuple[str, str | None, list[Any] | None]:
        """Return content, reasoning and tool calls; all text is content if transformers' parser cannot parse it."""
        from transformers.cli.serving.utils import parse_assistant_message

        raw, is_met = whole_text(self._tokenizer, output.generated_tokens, self.wishes, skip_special_tokens=False)
        try:
            return parse_assistant_message(self._processor, self._model, raw if is_met else output.generated_tokens,
                                           input_ids=self._prompt, cleaned_content=text,
                                           **self._of_tools(parse_assistant_message))
        except (ValueError, RuntimeError):  # for example, the text ends within a tool call
            return text, None, None

    # -- streams ------------------------------------------------------------------------------------------------------

    def _pieces(self, parsers: list[Any]) -> AsyncIterator[list[Piece]]:
        """Queue the requests and yield new pieces of all choices; stop after a piece with an error."""
        most = self._config.max_new_tokens
        choices = [ChoiceStream(i, self._tokenizer, self.wishes, most, parser) for i, parser in enumerate(parsers)]
        arrived: asyncio.Queue[Piece] = asyncio.Queue()

        def take(index: int, output: GenerationOutput) -> None:
            if choices[index].is_over:
                return
            try:
                arrived.put_nowait(choices[index].push(output))
            except Exception as error:  # raised by a parser
                arrived.put_nowait(Piece(index, error=str(error)))

        for index, choice in enumerate(choices):
            arrived.put_nowait(Piece(index, choice.begin()))
        self._queue(True, take)
        self.call.streams = True

        async def come() -> AsyncIterator[list[Piece]]:
            num_open = len(choices)
            while num_open:
                batch = [await arrived.get()]
                while not arrived.empty():
                    batch.append(arrived.get_nowait())
                yield batch
                if any(piece.error is not None for piece in batch):
                    return
                num_open -= sum(piece.finish_reason is not None for piece in batch)

        return come()

    async def _events(self, pieces: AsyncIterator[list[Piece]], chunks: ChatChunks | TextChunks,
                      kind: str) -> AsyncIterator[str]:
        head = {**self._head, "object": kind}
        num_choices, num_tokens, num_ended = len(self._requests), 0, 0
        opening = [chunk for index in range(num_choices) for chunk in chunks.opening(index)]
        if opening:
            yield "".join(_event({**head, "choices": [chunk]}) for chunk in opening)
        async for batch in pieces:
            events: list[str] = []
            for piece in batch:
                if piece.error is not None:
                    events.append(f"data: {json.dumps({'error': piece.error})}\n\n")  # transformers' format
                    yield "".join(events)
                    return
                num_tokens += piece.num_tokens
                events += [_event({**head, "choices": [chunk]}) for chunk in chunks.of(piece, self.wishes.logprobs)]
                if piece.finish_reason is None:
                    continue
                num_ended += 1
                events += [_event({**head, "choices": [chunk]}) for chunk in chunks.before_the_last(piece.index)]
                last = {**head, "choices": [chunks.last(piece.index, piece.finish_reason)]}
                events.append(_event(last | ({"usage": self._usage(num_tokens)} if num_ended == num_choices else {})))
            if events:
                yield "".join(events)
        if self.wishes.usage_chunk:
            yield _event({**head, "choices": [], "usage": self._usage(num_tokens)})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _queue(self, streaming: bool, take: Callable[[int, GenerationOutput], None]) -> None:
        """Submit all choices, with a suffix that makes request ids unique: clients may choose equal ids."""
        for index, requests in enumerate(self._requests):
            made = requests.add_request(self._prompt, f"{self._head['id']}-{uuid.uuid4().hex}", streaming=streaming,
                                        max_new_tokens=self._config.max_new_tokens,
                                        eos_token_id=self._config.eos_token_id)
            requests.register_result_handler(made, functools.partial(take, index))

    def _usage(self, num_tokens: int) -> dict[str, int]:
        """Return the token counts; the prompt counts once for all choices."""
        prompt = len(self._prompt)
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}

    def _of_tools(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the `tools` argument if `function` has one; transformers 5.17's parsers do not."""
        return {"tools": self._tools} if "tools" in inspect.signature(function).parameters else {}


class ChatChunks:
    """Builds the choices of chat chunks, and counts each choice's tool calls."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._num_calls: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"role": "assistant"}}]

    def of(self, piece: Piece, with_logprobs: bool) -> list[dict[str, Any]]:
        items = piece.items or ([""] if piece.tokens else [])
        chunks: list[dict[str, Any]] = [{"index": piece.index, "delta": self._delta(piece.index, i)} for i in items]
        if with_logprobs and piece.tokens:
            chunks[0]["logprobs"] = _chat_logprobs(piece.tokens)
        return chunks

    def before_the_last(self, index: int) -> list[dict[str, Any]]:
        return []

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": reason}

    def _delta(self, index: int, item: Any) -> dict[str, Any]:
        from transformers.cli.serving.utils import ReasoningText, ToolCall

        if isinstance(item, ToolCall):
            number = self._num_calls[index] = self._num_calls.get(index, -1) + 1
            return {"tool_calls": [{"index": number, **_tool_call(self._id, number, item)}]}
        return {"reasoning_content" if isinstance(item, ReasoningText) else "content": item}


class TextChunks:
    """Builds the choices of text chunks, and tracks each token's offset in the text so far."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._lengths: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def of(self, piece: Piece, with_logprobs: bool) -> list[dict[str, Any]]:
        items = piece.items or ([""] if piece.tokens else [])
        chunks: list[dict[str, Any]] = [{"index": piece.index, "text": item} for item in items]
        if with_logprobs and piece.tokens:
            start = self._lengths.get(piece.index, 0)
            chunks[0]["logprobs"] = _text_logprobs(piece.tokens, start)
            self._lengths[piece.index] = start + sum(len(token.text) for token in piece.tokens)
        return chunks

    def before_the_last(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "text": self._suffix}] if self._suffix else []

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": reason}


def _tool_call(request_id: str, number: int, call: Any) -> dict[str, Any]:
    return {"id": f"{request_id}_tool_call_{number}", "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(tokens: list[ScoredToken]) -> dict[str, Any]:
    return {"content": [{**_chat_token(token.text, token.logprob),
                         "top_logprobs": [_chat_token(*other) for other in token.likeliest]} for token in tokens],
            "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text_logprobs(tokens: list[ScoredToken], start: int) -> dict[str, Any]:
    """Return log-probabilities in the format of the completions endpoint; `start` is the first token's text offset."""
    offsets = [start]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token.text))
    return {"tokens": [token.text for token in tokens], "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if any(token.likeliest for token in tokens) else None,
            "text_offset": offsets}


def _by_text(token: ScoredToken) -> dict[str, float]:
    """Map the texts of the likeliest tokens and the sampled one to log-probabilities; the likelier of equal texts."""
    found: dict[str, float] = {}
    for text, logprob in (*token.likeliest, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
