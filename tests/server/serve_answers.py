"""Requests to the server whose prompt every test knows, and what is read out of their answers."""

from __future__ import annotations

import json
from pathlib import Path

from serve_bodies import TEXT
from serve_support import events_of
from support import TRAINED_MODEL
from transformers import AutoTokenizer

PROMPT = "count from 3 to 7"
LENGTH = 12
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def _marks():
    """The parser of chats would take what follows a mark for another message: nothing draws one."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / TRAINED_MODEL)
    return {str(token): -100 for token in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}}


NO_MARKS = _marks()


def ask(server, stream=False, path=TEXT, **fields):
    """The chunks of an answer, or the one body of an answer that is not streamed."""
    prompt = {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**prompt, "stream": stream, "max_tokens": LENGTH, "ignore_eos": True, "logit_bias": NO_MARKS, **fields}
    status, said = server.post(path, json.dumps(body).encode())
    assert status == 200, said
    return events_of(said) if stream else [said]


def choices_of(answer):
    """By index: the pieces of text, and why it ended."""
    pieces, reasons = {}, {}
    for choice in (choice for chunk in answer for choice in chunk["choices"]):
        message = choice.get("message", choice.get("delta", choice))
        pieces.setdefault(choice["index"], []).append(message.get("text", message.get("content", "")))
        reasons[choice["index"]] = choice.get("finish_reason", reasons.get(choice["index"]))
    return pieces, reasons


def text_of(answer):
    pieces, reasons = choices_of(answer)
    return "".join(pieces[0]), reasons[0]
