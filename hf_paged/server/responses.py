"""Answers of the Responses API, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from hf_paged.outputs import Completion, StepOutput
from hf_paged.server.choices import ReasoningText, ToolCall
from hf_paged.server.completions import Answer
from hf_paged.server.errors import DONE, event, failed_event
from hf_paged.server.generation import Generation
from hf_paged.server.protocol import ResponsesBody


class ResponsesAnswer(Answer):
    """An answer of `/v1/responses`, with one choice."""

    def __init__(self, request_id: str, model_id: str, body: ResponsesBody, generations: list[Generation]) -> None:
        super().__init__(request_id, model_id, body, generations)
        [self._choice] = self._choices
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": time.time(), "model": model_id,
                      "tools": [], "tool_choice": "auto", "parallel_tool_calls": body.parallel_tool_calls}

    def _whole(self, completions: list[Completion]) -> dict[str, Any]:
        made = self._choice.message(completions[0])
        items = [self._reasoning(made.reasoning)] if made.reasoning else []
        items.append(self._message(made.content))
        items += [self._call(number, call) for number, call in enumerate(made.calls)]
        return self._response(items, made.finish_reason, len(completions[0].token_ids))

    async def _events(self, all_of_it: AsyncIterator[list[tuple[int, StepOutput]]]) -> AsyncIterator[str]:
        stream = _ItemStream(self)
        for kind, status in (("response.created", "queued"), ("response.in_progress", "in_progress")):
            stream.add_event(kind, response={**self._head, "status": status, "output": []})
        for item in self._choice.begin():
            stream.add(item)
        num_tokens, reason = 0, "stop"
        try:
            async for outputs in all_of_it:
                for _, output in outputs:
                    piece = self._choice.push(output)
                    num_tokens += piece.num_tokens
                    reason = piece.finish_reason or reason
                    for item in piece.items:
                        stream.add(item)
                if events := stream.take():
                    yield events
        except Exception as error:
            yield stream.take() + failed_event(error) + DONE
            return
        stream.finish()
        response = self._response(stream.done, reason, num_tokens)
        stream.add_event(f"response.{response['status']}", response=response)
        yield stream.take() + DONE

    def _response(self, items: list[dict[str, Any]], reason: str, num_tokens: int) -> dict[str, Any]:
        prompt = self._num_prompt_tokens
        usage = {"input_tokens": prompt, "output_tokens": num_tokens, "total_tokens": prompt + num_tokens,
                 "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        end = {"status": "completed"} if reason != "length" else {
            "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self._head, **end, "output": items, "usage": usage}

    # -- items of the output ------------------------------------------------------------------------------------------

    def _reasoning(self, text: str | None) -> dict[str, Any]:
        """Return the item of the reasoning; None for one that has begun."""
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{self._id}", "type": "reasoning", "summary": [], "content": content,
                "status": "in_progress" if text is None else "completed"}

    def _message(self, text: str | None) -> dict[str, Any]:
        """Return the item of the message; None for one that has begun."""
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant",
                "content": [] if text is None else [_text_part(text)],
                "status": "in_progress" if text is None else "completed"}

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        name = f"{self._id}_tool_call_{number}"
        return {"id": name, "call_id": name, "type": "function_call", "name": call.name, "arguments": call.arguments,
                "status": "completed"}


class _ItemStream:
    """The events of the items of one answer.

    Attributes:
        done: the items that are complete.
    """

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer = answer
        self.done: list[dict[str, Any]] = []
        self._open: type | None = None  # the class of the parts of the item that has begun: str or ReasoningText
        self._text = ""  # of that item
        self._events: list[str] = []
        self._num_events, self._num_calls = 0, 0

    def add_event(self, kind: str, **fields: Any) -> None:
        self._events.append(f"event: {kind}\n" + event({"type": kind, "sequence_number": self._num_events, **fields}))
        self._num_events += 1

    def take(self) -> str:
        events, self._events = "".join(self._events), []
        return events

    def add(self, part: Any) -> None:
        """Append a part that transformers' parser returned."""
        if isinstance(part, ToolCall):
            self._close()
            item = self._answer._call(self._num_calls, part)
            self._num_calls += 1
            self._add_item_event("added", item)
            self._add_event_of("response.function_call_arguments.done", item, arguments=part.arguments, name=part.name)
            self._end(item)
            return
        kind = ReasoningText if isinstance(part, ReasoningText) else str
        if self._open is not kind:
            self._close()
            self._begin(kind)
        self._text += part
        self._add_text_event("delta", delta=part)

    def finish(self) -> None:
        """Close the item that has begun; an answer has a message, if an empty one."""
        self._close()
        if not any(item["type"] == "message" for item in self.done):
            self._begin(str)
            self._close()

    def _begin(self, kind: type) -> None:
        self._open, self._text = kind, ""
        self._add_item_event("added", self._item(None))
        if kind is str:
            self._add_event_of("response.content_part.added", self._item(None), content_index=0, part=_text_part(""))

    def _close(self) -> None:
        if self._open is None:
            return
        item = self._item(self._text)
        self._add_text_event("done", text=self._text)
        if self._open is str:
            self._add_event_of("response.content_part.done", item, content_index=0, part=_text_part(self._text))
        self._open = None
        self._end(item)

    def _item(self, text: str | None) -> dict[str, Any]:
        return self._answer._message(text) if self._open is str else self._answer._reasoning(text)

    def _add_text_event(self, what: str, **fields: Any) -> None:
        kind = "output_text" if self._open is str else "reasoning_text"
        fields |= {"logprobs": []} if self._open is str else {}
        self._add_event_of(f"response.{kind}.{what}", self._item(None), content_index=0, **fields)

    def _add_event_of(self, kind: str, item: dict[str, Any], **fields: Any) -> None:
        self.add_event(kind, item_id=item["id"], output_index=len(self.done), **fields)

    def _add_item_event(self, what: str, item: dict[str, Any]) -> None:
        self.add_event(f"response.output_item.{what}", output_index=len(self.done), item=item)

    def _end(self, item: dict[str, Any]) -> None:
        self._add_item_event("done", item)
        self.done.append(item)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
