"""Answers of the Responses API: items of the output, and the events of a stream."""

from __future__ import annotations

import json

import pytest
from serve_bodies import RESPONSES
from serve_support import events_of, openai
from transformers.cli.serving.utils import ReasoningText, ToolCall

from hf_paged.server.responses import _ItemStream

PROMPT = "count from 3 to 7"


def test_an_answer_is_whole_unless_a_stream_is_asked_for(server):
    """OpenAI's client reads both; an answer that its limit cut is incomplete."""
    asked = {"model": server.path, "input": PROMPT, "max_output_tokens": 5}
    whole = server.client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 5 and whole.output_text
    events = list(server.client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == ["response.created", "response.in_progress",
                                                                "response.incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.strip() == events[-1].response.output_text.strip() == whole.output_text.strip()
    done = server.client.responses.create(model=server.path, input=PROMPT, max_output_tokens=5, extra_body={
        "stop_token_ids": list(range(896))})
    assert done.status == "completed" and done.usage.output_tokens == 1


def test_conversations_reach_the_chat_template(server):
    """As items: messages, calls with their outputs, and instructions, which stand first."""
    def count(given, **fields):
        status, said = server.post(RESPONSES, json.dumps({"input": given, "max_output_tokens": 1, **fields}).encode())
        assert status == 200, said
        return said["usage"]["input_tokens"]

    plain = count(PROMPT)
    message = {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}
    assert count([message]) == count([{"type": "input_text", "text": PROMPT}]) == plain
    assert count(PROMPT, instructions="be brief") > plain
    system = {"role": "system", "content": "be brief"}
    assert count([system, message]) == count(PROMPT, instructions="be brief") == count(
        [{**system, "content": "anything"}, message], instructions="be brief")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "a b c d"}
    assert count([message, call, output]) > plain
    with pytest.raises(openai.BadRequestError, match="input: an item of type='odd'"):
        server.client.responses.create(model=server.path, input=[message, {"type": "odd"}])


def test_a_stream_that_begins_has_the_status_of_its_error(server):
    status, said = server.post(RESPONSES, json.dumps({"input": PROMPT, "stream": True, "temperature": 1e-300}).encode())
    assert status == 400 and "temperature" in said["error"]["message"]
    status, said = server.post(RESPONSES, json.dumps({"input": PROMPT, "stream": True}).encode())
    assert status == 200 and events_of(said)[-1]["type"] in ("response.completed", "response.incomplete")


class Answer:
    """Items with their parts alone."""

    def _message(self, text):
        return {"id": "message", "type": "message", "text": text}

    def _reasoning(self, text):
        return {"id": "reasoning", "type": "reasoning", "text": text}

    def _call(self, number, call):
        return {"id": f"call {number}", "type": "function_call", "name": call.name}


def test_items_follow_each_other_and_each_is_closed():
    stream = _ItemStream(Answer())
    for part in (ReasoningText("hm"), ReasoningText("m"), "a", "b", ToolCall("f", "{}"), ToolCall("g", "{}")):
        stream.add(part)
    stream.finish()
    events = [json.loads(line.removeprefix("data: ")) for line in stream.take().splitlines() if line.startswith("data")]
    assert [item["id"] for item in stream.done] == ["reasoning", "message", "call 0", "call 1"]
    assert [item["text"] for item in stream.done[:2]] == ["hmm", "ab"]
    kinds = [(event["type"].removeprefix("response."), event["output_index"]) for event in events]
    assert kinds == [
        ("output_item.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.delta", 0), ("reasoning_text.done", 0),
        ("output_item.done", 0), ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1),
        ("output_text.delta", 1), ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.done", 2), ("output_item.done", 2),
        ("output_item.added", 3), ("function_call_arguments.done", 3), ("output_item.done", 3)]
    empty = _ItemStream(Answer())
    empty.finish()
    assert [item["text"] for item in empty.done] == [""]
