"""Table of the request-body fields that the server carries out, and the values of other fields that it accepts.

Every other value raises an error with the field, the value and what is accepted, so that no field is ignored
silently. docs/server.md shows the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hf_paged.options.chat_keywords import OURS
from hf_paged.options.option_values import share
from hf_paged.options.request_options import MOST_PENALTY
from hf_paged.options.table import DRAWS
from hf_paged.server.calls import RefusedRequestError
from hf_paged.server.forms import (
    EXPECTED_CHOICE,
    EXPECTED_FORMAT,
    EXPECTED_GUIDED,
    EXPECTED_OUTPUTS,
    EXPECTED_TEXT,
    check_forms,
    guided,
    read_format,
    read_outputs,
    read_text,
    read_tool_choice,
)
from hf_paged.server.server_request import MOST_CHOICES, ServerRequest

CHAT, TEXT, RESPONSES = "chat", "text", "responses"
ALL = (CHAT, TEXT, RESPONSES)


class Passed(NamedTuple):
    """Body field that transformers' own handler reads: what is accepted, and a check that raises ValueError or
    TypeError for any other value."""

    endpoints: tuple[str, ...]
    expected: str
    check: Callable[[Any], Any]


class Refused(NamedTuple):
    """Body field that the server does not carry out: the values without effect, and the error text for all others."""

    endpoints: tuple[str, ...]
    passes: tuple[Any, ...]
    expected: str


_NOT_STORED = "the server keeps no answers"
_NO_TOOLS_OF_ITS_OWN = "expected it left out: the server runs no tools"
_ONE_TIER = "expected 'auto' or 'default': every request is served alike"
_TEXT_ONLY = "expected it left out: answers are text"
_NO_CHECKS = "expected it left out: the server checks no content"

REFUSED: dict[str, Refused] = {
    "verbosity": Refused((CHAT,), ("medium",), "expected 'medium', which is no wish"),
    "functions": Refused((CHAT,), ([],), "expected tools in its place"),
    "function_call": Refused((CHAT,), ("none", "auto"), "expected tool_choice in its place"),
    "audio": Refused((CHAT,), (), _TEXT_ONLY),
    "image": Refused((RESPONSES,), (), _TEXT_ONLY),
    "modalities": Refused((CHAT,), (["text"],), "expected ['text']: answers are text"),
    "prediction": Refused((CHAT,), (), "expected it left out: there is no speculative decoding of it"),
    "web_search_options": Refused((CHAT,), (), _NO_TOOLS_OF_ITS_OWN),
    "max_tool_calls": Refused((RESPONSES,), (), _NO_TOOLS_OF_ITS_OWN),
    "moderation": Refused((CHAT, RESPONSES), (), _NO_CHECKS),
    "access_programs": Refused((RESPONSES,), ([],), _NO_CHECKS),
    "metadata": Refused((CHAT, RESPONSES), ({},), f"expected it left out: {_NOT_STORED}"),
    "store": Refused((CHAT, RESPONSES), (False,), f"expected false: {_NOT_STORED}"),
    "background": Refused((RESPONSES,), (False,), f"expected false: {_NOT_STORED}"),
    "background_options": Refused((RESPONSES,), ({},), f"expected it left out: {_NOT_STORED}"),
    "conversation": Refused((RESPONSES,), (), f"expected the whole conversation as input: {_NOT_STORED}"),
    "previous_response_id": Refused((RESPONSES,), (), f"expected the whole conversation as input: {_NOT_STORED}"),
    "prompt": Refused((RESPONSES,), (), f"expected its text as input: {_NOT_STORED}"),
    "context_management": Refused((RESPONSES,), ([],), "expected it left out: inputs are taken as they are"),
    "truncation": Refused((RESPONSES,), ("disabled",), "expected 'disabled': inputs are taken as they are"),
    "include": Refused((RESPONSES,), ([],), "expected []: an answer has its text, its reasoning and its calls"),
    "service_tier": Refused((CHAT, RESPONSES), ("auto", "default"), _ONE_TIER),
    "prompt_cache_options": Refused((CHAT, RESPONSES), ({},), "expected it left out: prefixes are cached as long as "
                                                              "there is room"),
    "prompt_cache_retention": Refused((CHAT, RESPONSES), ("in_memory", "in-memory"), "expected 'in_memory'"),
    "echo": Refused((TEXT,), (False,), "expected false: an answer holds new text alone"),
}


class Read(NamedTuple):
    """Body field that the server carries out: what is accepted, and a reader that raises ValueError or TypeError."""

    endpoints: tuple[str, ...]
    expected: str
    read: Callable[[Any, ServerRequest], None]


def _number(value: Any, least: float, most: float = math.inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError
    if not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _integer(value: Any, least: int, most: int = 2**63 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _object(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


_FLOAT32 = (2.0**-149, (2 - 2**-23) * 2.0**127)  # smallest positive and largest finite value


def _keywords(value: Any) -> None:
    if not _NOT_KEYWORDS.isdisjoint(_object(value)):
        raise ValueError


def _messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise TypeError
    for message in value:
        _text(_object(message).get("role"))
        content = message.get("content") or []
        if not isinstance(content, str) and not (isinstance(content, list) and all(map(_is_part, content))):
            raise TypeError


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _items(value: Any) -> None:
    if not isinstance(value, (str, list, dict)) or not value:
        raise TypeError


_TEXT = "expected a string"
_MESSAGES = "expected a list of objects, each with a role and a content (text, or a list of parts with their type)"
_ITEMS = "expected a string, or a list of messages and items of the Responses API"
_CONFIG = "expected a string that holds a JSON object of GenerationConfig fields"
# Chat-template keywords that transformers' handler, or another body field, already sets.
_NOT_KEYWORDS = frozenset({*OURS, "add_generation_prompt", "conversation", "load_audio_from_video", "tools"})
_KEYWORDS = ("expected an object of names that the model's chat template refers to, without "
             f"{', '.join(sorted(_NOT_KEYWORDS))}")

PASSED: dict[str, Passed] = {
    "messages": Passed((CHAT,), _MESSAGES, _messages),
    "prompt": Passed((TEXT,), _TEXT, _text),
    "suffix": Passed((TEXT,), _TEXT, _text),
    "input": Passed((RESPONSES,), _ITEMS, _items),
    "instructions": Passed((RESPONSES,), _TEXT, _text),
    "model": Passed(ALL, _TEXT, _text),
    "stream": Passed(ALL, "expected true or false", _flag),
    "generation_config": Passed(ALL, _CONFIG, _text),
    "chat_template_kwargs": Passed((CHAT,), _KEYWORDS, _keywords),
}


def _temperature(value: Any, wishes: ServerRequest) -> None:
    wishes.temperature = _number(value, 0)


def _filter(name: str, least: float, most: float) -> Callable[[Any, ServerRequest], None]:
    def read(value: Any, wishes: ServerRequest) -> None:
        wishes.filters[name] = _number(value, least, most)

    return read


def _top_k(value: Any, wishes: ServerRequest) -> None:
    wishes.filters["top_k"] = max(_integer(value, -1, 2**31 - 1), 0)


def _repetition_penalty(value: Any, wishes: ServerRequest) -> None:
    wishes.settings["repetition_penalty"] = _number(value, *_FLOAT32)


def _count_penalty(name: str) -> Callable[[Any, ServerRequest], None]:
    def read(value: Any, wishes: ServerRequest) -> None:
        if penalty := _number(value, -MOST_PENALTY, MOST_PENALTY):
            wishes.penalties[name] = penalty

    return read


def _length(name: str) -> Callable[[Any, ServerRequest], None]:
    def read(value: Any, wishes: ServerRequest) -> None:
        wishes.settings[name] = _integer(value, 0 if name == "min_new_tokens" else 1)

    return read


def _logit_bias(value: Any, wishes: ServerRequest) -> None:
    if not all(token.isascii() and token.isdecimal() and str(int(token)) == token for token in _object(value)):
        raise ValueError
    bias = {(int(token),): _number(number, -100, 100) for token, number in value.items()}
    if bias:
        wishes.settings["sequence_bias"] = bias


def _stop(value: Any, wishes: ServerRequest) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise TypeError
    wishes.stop = tuple(texts)


def _stop_token_ids(value: Any, wishes: ServerRequest) -> None:
    if not isinstance(value, list):
        raise TypeError
    wishes.stop_token_ids = tuple(_integer(token, 0) for token in value)


def _set(name: str, check: Callable[..., Any], *limits: int) -> Callable[[Any, ServerRequest], None]:
    def read(value: Any, wishes: ServerRequest) -> None:
        setattr(wishes, name, check(value, *limits))

    return read


def _seed(value: Any, wishes: ServerRequest) -> None:
    wishes.seed = _integer(value, -(2**63)) % 2**63


def _no_top_logprobs(value: Any, wishes: ServerRequest) -> None:
    _integer(value, 0, 0)


def _top_logprobs(value: Any, wishes: ServerRequest) -> None:
    wishes.top_logprobs = _integer(value, 0, _MOST_TOP) or None


def _text_logprobs(value: Any, wishes: ServerRequest) -> None:
    _top_logprobs(value, wishes)
    wishes.logprobs = True


def _stream_options(value: Any, wishes: ServerRequest) -> None:
    options = {name: flag for name, flag in _object(value).items() if flag is not None}
    wishes.has_stream_options = True
    wishes.usage_chunk = _flag(options.pop("include_usage", False))
    if options.pop("include_obfuscation", False) is not False or options:
        raise ValueError


def _responses_stream_options(value: Any, wishes: ServerRequest) -> None:
    if any(name != "include_obfuscation" or flag is not False for name, flag in _object(value).items()):
        raise ValueError


def _tools(value: Any, wishes: ServerRequest) -> None:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise TypeError
    if not all(tool.get("type") == "function" and _has_name(tool.get("function", tool)) for tool in value):
        raise ValueError
    wishes.tools = value


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _effort(value: Any, wishes: ServerRequest) -> None:
    wishes.reasoning_effort = _text(value)


def _reasoning(value: Any, wishes: ServerRequest) -> None:
    options = {name: option for name, option in _object(value).items() if option is not None}
    if "effort" in options:
        _effort(options.pop("effort"), wishes)
    if options:
        raise ValueError


def _label(value: Any, wishes: ServerRequest) -> None:
    _text(value)


_MOST_TOP = 20  # the limit of OpenAI's chat endpoint
_UP_TO_20 = "expected an integer in [0, 20]: how many of the likeliest tokens are told in the place of each"
_PENALTY = "expected a number in [-2, 2]"
_ONE_OR_MORE = "expected an integer of at least 1"
_FUNCTIONS = "expected a list of function definitions, each with type 'function' and a name"
_WHO_ASKS = "expected a string, which changes no answer"

READ: dict[str, Read] = {
    "max_tokens": Read((CHAT, TEXT), _ONE_OR_MORE, _length("max_new_tokens")),
    "max_completion_tokens": Read((CHAT,), _ONE_OR_MORE, _length("max_new_tokens")),
    "max_output_tokens": Read((RESPONSES,), _ONE_OR_MORE, _length("max_new_tokens")),
    "min_tokens": Read(ALL, "expected an integer of at least 0", _length("min_new_tokens")),
    "temperature": Read(ALL, "expected a number of at least 0", _temperature),
    **{option.name: Read(ALL, "expected a number in [0, 1]", _filter(option.name, 0, 1))
       for option in DRAWS if option.draws is share},
    "top_k": Read(ALL, "expected an integer of at least 1, or 0 or -1 for all tokens", _top_k),
    "repetition_penalty": Read(ALL, "expected a number above 0 that float32 holds", _repetition_penalty),
    "presence_penalty": Read((CHAT, TEXT), _PENALTY, _count_penalty("presence_penalty")),
    "frequency_penalty": Read((CHAT, TEXT), _PENALTY, _count_penalty("frequency_penalty")),
    "seed": Read(ALL, "expected an integer in [-2**63, 2**63)", _seed),
    "logit_bias": Read((CHAT, TEXT), "expected an object of token ids in digits with numbers in [-100, 100]",
                       _logit_bias),
    "stop": Read((CHAT, TEXT), "expected a string or a list of strings, none of them empty", _stop),
    "include_stop_str_in_output": Read((CHAT, TEXT), "expected true or false", _set("keeps_stop", _flag)),
    "stop_token_ids": Read(ALL, "expected a list of token ids", _stop_token_ids),
    "ignore_eos": Read(ALL, "expected true or false", _set("ignores_eos", _flag)),
    "n": Read((CHAT, TEXT), f"expected an integer in [1, {MOST_CHOICES}]", _set("n", _integer, 1, MOST_CHOICES)),
    "best_of": Read((TEXT,), "expected it to be n: choices are not ranked", _set("best_of", _integer, 1)),
    "stream_options": Read((CHAT, TEXT), "expected an object with include_usage as true or false", _stream_options),
    "tools": Read((CHAT, RESPONSES), _FUNCTIONS, _tools),
    "tool_choice": Read((CHAT, RESPONSES), EXPECTED_CHOICE, read_tool_choice),
    "parallel_tool_calls": Read((CHAT, RESPONSES), "expected true or false", _set("parallel_calls", _flag)),
    "response_format": Read((CHAT,), EXPECTED_FORMAT, read_format),
    "text": Read((RESPONSES,), EXPECTED_TEXT, read_text),
    "structured_outputs": Read((CHAT, TEXT), EXPECTED_OUTPUTS, read_outputs),
    **{name: Read((CHAT, TEXT), expected, guided(name.removeprefix("guided_")))
       for name, expected in EXPECTED_GUIDED.items()},
    "reasoning_effort": Read((CHAT,), "expected a string", _effort),
    "reasoning": Read((RESPONSES,), "expected an object with nothing but an effort", _reasoning),
    "user": Read(ALL, _WHO_ASKS, _label),
    "safety_identifier": Read((CHAT, RESPONSES), _WHO_ASKS, _label),
    "prompt_cache_key": Read((CHAT, RESPONSES), _WHO_ASKS, _label),
}
# Fields whose meaning depends on the endpoint.
OWN_READ: dict[tuple[str, str], Read] = {
    (CHAT, "logprobs"): Read((CHAT,), "expected true or false", _set("logprobs", _flag)),
    (CHAT, "top_logprobs"): Read((CHAT,), _UP_TO_20, _top_logprobs),
    (TEXT, "logprobs"): Read((TEXT,), _UP_TO_20, _text_logprobs),
    (RESPONSES, "top_logprobs"): Read((RESPONSES,), "expected 0: this endpoint gives no log-probabilities",
                                      _no_top_logprobs),
    (RESPONSES, "stream_options"): Read((RESPONSES,), "expected include_obfuscation as false",
                                        _responses_stream_options),
}


def passed(endpoint: str) -> dict[str, Passed]:
    """Return the fields of an endpoint that transformers' handler reads."""
    return {name: field for name, field in PASSED.items() if endpoint in field.endpoints}


def readable(endpoint: str) -> dict[str, Read]:
    """Return the fields that the server carries out at an endpoint, besides `passed`."""
    found = {name: field for name, field in READ.items() if endpoint in field.endpoints}
    return found | {name: field for (where, name), field in OWN_READ.items() if where == endpoint}


_PASSED = {endpoint: passed(endpoint) for endpoint in ALL}
_READABLE = {endpoint: readable(endpoint) for endpoint in ALL}
_NULL_IS_FALSE = ("stream",)  # transformers' Responses API streams when the field is absent


def read_body(endpoint: str, body: dict[str, Any]) -> ServerRequest:
    """Parse and check a request body.

    Raises:
        RefusedRequestError: If the endpoint does not have a field, or does not carry out its value.
    """
    wishes, fields = ServerRequest(has_one_choice=endpoint == RESPONSES), _READABLE[endpoint]
    for name, value in body.items():
        if value is None and name in _NULL_IS_FALSE:
            wishes.body[name] = False
        elif value is None and (name in _PASSED[endpoint] or name in fields or name in REFUSED):
            continue  # null means the same as an absent field
        elif name in _PASSED[endpoint]:
            with _refused(name, value, _PASSED[endpoint][name].expected):
                _PASSED[endpoint][name].check(value)
            wishes.body[name] = value
        elif name in fields:
            with _refused(name, value, fields[name].expected):
                fields[name].read(value, wishes)
        elif name in REFUSED and endpoint in REFUSED[name].endpoints:
            if not any(_is_same(value, neutral) for neutral in REFUSED[name].passes):
                raise _refusal(name, value, REFUSED[name].expected)
        else:
            raise _refusal(name, value, f"expected one of the fields of this endpoint, {', '.join(_known(endpoint))}")
    if body.get("max_completion_tokens") is not None and endpoint == CHAT:
        wishes.settings["max_new_tokens"] = body["max_completion_tokens"]
    _check_together(body, wishes)
    return wishes


@contextmanager
def _refused(name: str, value: Any, expected: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OverflowError):
        raise _refusal(name, value, expected) from None


def _check_together(body: dict[str, Any], wishes: ServerRequest) -> None:
    if wishes.best_of not in (None, wishes.n or 1):
        raise _refusal("best_of", wishes.best_of, READ["best_of"].expected)
    if wishes.top_logprobs and not wishes.logprobs:
        raise _refusal("top_logprobs", wishes.top_logprobs, "expected logprobs to be true with it")
    if wishes.has_stream_options and not body.get("stream"):
        raise _refusal("stream_options", body["stream_options"], "expected stream to be true with it")
    if wishes.has_tools and not wishes.parallel_calls and wishes.must_call is None:
        raise _refusal("parallel_tool_calls", False, "expected true with tools, unless tool_choice says that one "
                                                     "has to be called")
    check_forms(body, wishes)


def _known(endpoint: str) -> list[str]:
    refused = (name for name, field in REFUSED.items() if endpoint in field.endpoints)
    return sorted({*_PASSED[endpoint], *_READABLE[endpoint], *refused})


def _is_same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _refusal(name: str, value: Any, expected: str) -> RefusedRequestError:
    return RefusedRequestError(f"{name}={value!r:.200}: {expected}")
