"""Request bodies that are malformed, odd or too large, for every endpoint of the server that generates."""

from __future__ import annotations

import json
from typing import Any

from hostile_values import FIELDS as HOSTILE_FIELDS
from hostile_values import SAMPLING, values_of

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = (CHAT, TEXT, RESPONSES)
_HELLO = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": _HELLO}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}
LIMITS = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens"}
HUGE = 2**70
_NESTED = b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"

# Bodies that are no JSON object at all.
RAW: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "NaN": b"NaN",
    "text": b'"hi"',
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "deeply nested": _NESTED,
    "an integer of many digits": b'{"seed": ' + b"9" * 5000 + b"}",
}

# Fields laid over a plain body, with the endpoint that has them; None: all of them have.
FIELDS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {"model": "somebody/else"}),
    (None, {"model": 5}),
    (None, {"model": None}),
    (None, {"no_such_field": 1}),
    (None, {"temperature": "hot"}),
    (None, {"temperature": -1.0}),
    (None, {"temperature": float("nan")}),
    (None, {"temperature": float("inf")}),
    (None, {"temperature": [1.0]}),
    (None, {"temperature": HUGE}),
    (None, {"top_p": "x"}),
    (None, {"top_p": 2.0}),
    (None, {"top_p": -0.5}),
    (None, {"seed": "x"}),
    (None, {"seed": HUGE}),
    (None, {"seed": -1}),
    (None, {"seed": [1]}),
    (None, {"seed": 1.5}),
    (None, {"generation_config": "no json"}),
    (None, {"generation_config": "[]"}),
    (None, {"generation_config": "5"}),
    (None, {"generation_config": {"max_new_tokens": 2}}),
    (None, {"generation_config": 5}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "no_such_field": 1})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": -5})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 0})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": "x"})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "do_sample": True, "temperature": "hot"})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "do_sample": True, "temperature": 0.0})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "do_sample": True, "top_k": -3})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "do_sample": True, "top_p": 7})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "num_return_sequences": 0})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "num_return_sequences": 3})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "num_beams": -1})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "bad_words_ids": "x"})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "bad_words_ids": [[10**6]]})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "sequence_bias": 5})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "repetition_penalty": -1.0})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "eos_token_id": "x"})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "suppress_tokens": ["x"]})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "no_repeat_ngram_size": -1})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "exponential_decay_length_penalty": [1]})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "cache_implementation": "none such"})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "watermarking_config": 5})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "stop_strings": [5]})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "do_sample": True, "temperature": 1e-300})}),
    (None, {"generation_config": json.dumps({"max_new_tokens": 2, "output_scores": True})}),
    (CHAT, {"messages": None}),
    (CHAT, {"messages": "hi"}),
    (CHAT, {"messages": {}}),
    (CHAT, {"messages": [5]}),
    (CHAT, {"messages": ["hi"]}),
    (CHAT, {"messages": [{}]}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": 5, "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "nobody", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "hi"}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
    (CHAT, {"messages": []}),
    (CHAT, {"tools": 5}),
    (CHAT, {"tools": "x"}),
    (CHAT, {"tools": [5]}),
    (CHAT, {"tools": [{}]}),
    (CHAT, {"chat_template_kwargs": 5}),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{% if %}"}}),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ nothing }}"}}),
    (CHAT, {"logit_bias": 5}),
    (CHAT, {"logit_bias": {"x": 1.0}}),
    (CHAT, {"logit_bias": {"5": "x"}}),
    (CHAT, {"logit_bias": {str(10**6): 1.0}}),
    (CHAT, {"logit_bias": {"-1": 1.0}}),
    (CHAT, {"max_completion_tokens": "x"}),
    (CHAT, {"frequency_penalty": "x"}),
    (CHAT, {"frequency_penalty": -5.0}),
    (CHAT, {"stop": 5}),
    (CHAT, {"stop": [5]}),
    (CHAT, {"stop": ""}),
    (CHAT, {"stop": []}),
    (CHAT, {"stop": {"x": 1}}),
    (TEXT, {"prompt": 5}),
    (TEXT, {"prompt": ["a", "b"]}),
    (TEXT, {"prompt": ["a", 5]}),
    (TEXT, {"prompt": [[5, -1]]}),
    (TEXT, {"echo": "yes"}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": "\ud800"}),
    (TEXT, {"suffix": 5}),
    (TEXT, {"suffix": "\ud800"}),
    (TEXT, {"stop": 5}),
    (TEXT, {"frequency_penalty": "x"}),
    (RESPONSES, {"input": 5}),
    (RESPONSES, {"input": None}),
    (RESPONSES, {"input": {}}),
    (RESPONSES, {"input": [5]}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"input": [{"type": "no such type", "x": 1}]}),
    (RESPONSES, {"input": [{"role": "user"}, {"type": "no such type"}]}),
    (RESPONSES, {"input": [{"role": "user", "content": "hi"}, {"type": "function_call"}]}),
    (RESPONSES, {"instructions": 5}),
    (RESPONSES, {"tools": 5}),
    (RESPONSES, {"tools": [5]}),
    (RESPONSES, {"parallel_tool_calls": "x"}),
]


def bodies(stream: bool = False) -> list[tuple[str, str, bytes]]:
    """(name, endpoint, body) of every request. What concerns all endpoints goes to one after the other."""
    made = [(name, ENDPOINTS[i % 3], raw) for i, (name, raw) in enumerate(RAW.items())]
    for i, (only, fields) in enumerate(FIELDS):
        path = only or ENDPOINTS[i % 3]
        made.append((json.dumps(fields), path, encoded(path, fields, stream)))
    for i, limit in enumerate(("x", -1, 0, 1.5, [1], float("nan"), float("inf"))):
        path = ENDPOINTS[i % 3]
        made.append((f"{LIMITS[path]}={limit!r}", path, encoded(path, {LIMITS[path]: limit}, stream)))
    return [*made, *(("no prompt", path, json.dumps({"stream": stream}).encode()) for path in ENDPOINTS)]


# The field by which stock takes layers off the model, and leaves it broken, has a test of its own.
SETTINGS = (*HOSTILE_FIELDS, "compile_config")
SOON = 778  # a token that greedy search comes to soon after the plain prompt, so that no length is endless


def hostile_bodies(stream: bool = False) -> list[tuple[str, str, bytes]]:
    """(field, value, body) of every field of a GenerationConfig with every odd value that JSON can say."""
    made = []
    for field in SETTINGS:
        for value in values_of(field):
            if type(value) is object:
                continue
            config = {"max_new_tokens": 2, "eos_token_id": SOON, "do_sample": field in SAMPLING, field: value}
            body = encoded(TEXT, {"generation_config": json.dumps(config)}, stream)
            made.append((field, f"{value!r:.60}", body))
    return made


def encoded(path: str, fields: dict[str, Any], stream: bool = False) -> bytes:
    """A plain body of this endpoint, two tokens long, with `fields` over it."""
    body = {**PROMPTS[path], LIMITS[path]: 2, "stream": stream, **fields}
    if "generation_config" in fields:
        del body[LIMITS[path]]
    return json.dumps(body).encode()
