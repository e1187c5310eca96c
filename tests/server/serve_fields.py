"""What every field of a body means, written down a second time, and values that hardly any field means."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from typing import Any

CHAT, TEXT, RESPONSES = "chat", "text", "responses"  # `endpoint` of the bodies
VOCAB_SIZE = 896  # of the tiny trained model
HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
MOST_FLOAT, LEAST_FLOAT = 3.4028234663852886e38, 2**-149
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
# Strings, numbers at and past the edges of what a field or a tensor holds, flags, lists and objects of each.
ODD: list[Any] = [
    "x", "", "yes", "true", "5", "auto", "none", 0, 1, 5, -1, -2, 0.5, 1.5, 2**31, 2**63, 2**64, 10**400, 1e-300, 1e300,
    math.nan, math.inf, -math.inf, True, False, [], ["x"], [""], ["5"], [5], [-1], [5.0], [True], [VOCAB_SIZE], [10**9],
    [None], [[]], {}, {"x": 1}, {"5": 1}, {"5_0": 1}, {" 5 ": 1}, {"05": 1}, {"+5": 1}, {"\u0665": 1}, {"-1": 1},
    {"5.0": 1}, {str(VOCAB_SIZE): 1}, {str(10**9): 1}, {"5": True}, {"5": "1"}, {"5": 101}, {"5": math.nan},
    {"effort": 5}, {"effort": "low", "x": 1}, {"include_usage": True}, {"include_usage": 5}, {"include_usage": "yes"},
    {"include_obfuscation": 0}, {"include_obfuscation": True}, {"include_obfuscation": False}, {"type": "json_object"},
    {"type": "text"}, {"format": {"type": "text"}}, [{"type": "function"}], [{"type": "web_search"}], TOOLS[0],
    {"enable_thinking": False}, {"enable_thinkng": False}, {"tokenize": False}, {"documents": []},
    {"max_length": 5}, {"truncation": "yes"}, {"continue_final_message": True}, {"tokenizer_kwargs": {}},
    {"add_generation_prompt": False}, '{"max_new_tokens": 2}', "[]", '{"no_such_field": 1}', '{"max_new_tokens": "x"}',
    [{}], [{"role": 5}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "no_such_part"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "hi"}],
]
Meant = Callable[[Any], bool]


def number(least: float, most: float) -> Meant:
    return lambda value: type(value) in (int, float) and least <= value <= most


def integer(least: int, most: int = 2**63 - 1) -> Meant:
    return lambda value: type(value) is int and least <= value <= most


def one_of(*values: Any) -> Meant:
    return lambda value: json.dumps(value) in map(json.dumps, values)


def flag(value: Any) -> bool:
    return type(value) is bool


def text(value: Any) -> bool:
    return isinstance(value, str)


def nothing(value: Any) -> bool:
    return False


def token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < VOCAB_SIZE for token in value)


def compiles(kind: str, form: str) -> bool:
    import xgrammar

    try:
        {"regex": xgrammar.Grammar.from_regex, "json": xgrammar.Grammar.from_json_schema}[kind](form)
    except RuntimeError:
        return False
    return True


def prompt(value: Any) -> bool:
    return (text(value) or token_list(value)) and len(value) > 0


def schema(value: Any) -> bool:
    """An object, or true; or a text of one of them."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return (isinstance(value, dict) or value is True) and "NaN" not in json.dumps(value) and compiles(
        "json", json.dumps(value))


def texts(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value
    return isinstance(found, list) and all(isinstance(one, str) and one for one in found)


# Values that are carried out, or that ask for nothing; all others are refused.
MEANT: dict[str, Meant | dict[str, Meant]] = {
    "messages": one_of([{"role": "user"}], [{"role": "user", "content": "hi"}]),
    "prompt": {TEXT: lambda value: prompt(value) or (isinstance(value, list) and value != [] and all(map(prompt,
                                                                                                      value))),
               RESPONSES: nothing},
    "suffix": text,
    "input": lambda value: (text(value) and value != "") or value in ([{"role": "user", "content": "hi"}],
                                                                    [{"role": "user"}]),
    "instructions": text,
    "model": nothing,  # the server's own
    "stream": flag,
    "generation_config": one_of('{"max_new_tokens": 2}'),
    # The model's template refers to none of these names, and no documents are nothing to render.
    "chat_template_kwargs": one_of({}, {"documents": []}),
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "max_output_tokens": integer(1),
    "min_tokens": integer(0, 2),
    "temperature": lambda value: (value == 0 and type(value) is int) or number(LEAST_FLOAT, 1e300)(value),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "top_k": integer(-1, 2**31 - 1),
    "repetition_penalty": number(LEAST_FLOAT, MOST_FLOAT),
    "seed": integer(-(2**63)),
    "logit_bias": one_of({}, {"5": 1}),
    "stop": texts,
    "include_stop_str_in_output": flag,
    "stop_token_ids": token_list,
    "ignore_eos": flag,
    "n": integer(1, 128),
    "best_of": one_of(1),
    "logprobs": {CHAT: flag, TEXT: integer(0, 20)},
    "top_logprobs": one_of(0),  # others with logprobs alone
    "stream_options": {CHAT: one_of({}, {"include_usage": True}, {"include_obfuscation": False}),
                       TEXT: one_of({}, {"include_usage": True}, {"include_obfuscation": False}),
                       RESPONSES: one_of({}, {"include_obfuscation": False})},
    "tools": one_of([]),  # the model's template refers to none
    "tool_choice": one_of("auto", "none"),
    "parallel_tool_calls": flag,
    "reasoning_effort": nothing,  # as of the template
    "reasoning": one_of({}),
    "user": text,
    "safety_identifier": text,
    "prompt_cache_key": text,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "response_format": one_of({"type": "text"}, *([{"type": "json_object"}] if HAS_XGRAMMAR else [])),
    "text": one_of({}, {"format": {"type": "text"}}),
    "structured_outputs": nothing,
    "guided_json": lambda value: HAS_XGRAMMAR and schema(value),
    "guided_regex": lambda value: HAS_XGRAMMAR and text(value) and value != "" and compiles("regex", value),
    "guided_choice": lambda value: isinstance(value, list) and value != [] and texts(value) and HAS_XGRAMMAR,
    "guided_grammar": nothing,
    "verbosity": nothing,
    "functions": one_of([]),
    "function_call": one_of("none", "auto"),
    "audio": nothing,
    "image": nothing,
    "modalities": nothing,
    "prediction": nothing,
    "web_search_options": nothing,
    "max_tool_calls": nothing,
    "moderation": nothing,
    "access_programs": one_of([]),
    "metadata": one_of({}),
    "store": one_of(False),
    "background": one_of(False),
    "background_options": one_of({}),
    "conversation": nothing,
    "previous_response_id": nothing,
    "context_management": one_of([]),
    "truncation": nothing,
    "include": one_of([]),
    "service_tier": one_of("auto"),
    "prompt_cache_options": one_of({}),
    "prompt_cache_retention": nothing,
    "echo": flag,
}


def is_meant(endpoint: str, name: str, value: Any) -> bool:
    """Is this value of a field carried out, or does it ask for nothing?"""
    meant = MEANT[name]
    return (meant[endpoint] if isinstance(meant, dict) else meant)(value)
