"""Structured output of an answer: the body fields that request it, and tool calls in the model's own syntax."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hf_paged.integration.enable import get_engine, is_enabled
from hf_paged.integration.install import enable_once
from hf_paged.integration.structured_calls import NO_FORM, Form
from hf_paged.options.structured import STRUCTURAL_TAG, FormError, Structured, read_structured
from hf_paged.server.calls import RefusedRequestError
from hf_paged.server.server_request import ServerRequest

_SPECIAL = frozenset("\\.^$*+?{}[]|()")  # metacharacters of a regular expression
_OF_SCHEMA = frozenset({"name", "schema", "strict", "description"})
# Without free white space where a client cannot request it: some models would generate white space endlessly.
_COMPACT = {"any_whitespace": False}
_ANY_OBJECT = {"json_schema": {"type": "object"}, **_COMPACT}
# vLLM's names of the kinds of structured output.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}

EXPECTED_FORMAT = ("expected an object of type 'text', 'json_object' or 'json_schema', the last with a json_schema "
                   "that holds a schema")
EXPECTED_TEXT = ("expected an object with nothing but a format of type 'text', 'json_object' or 'json_schema', the "
                 "last with a schema")
EXPECTED_OUTPUTS = ("expected an object with one of json, json_object (true), regex, choice and grammar, the first "
                    "two maybe with disable_any_whitespace")
EXPECTED_CHOICE = ("expected 'auto', 'none', 'required' or an object of type 'function' with the name of one of the "
                   "tools")
EXPECTED_GUIDED = {
    "guided_json": "expected a JSON schema, as an object or a string", "guided_regex": "expected a regular expression",
    "guided_choice": "expected a list of strings, none of them empty",
    "guided_grammar": "expected an EBNF grammar whose first rule is called root",
}


def _ask(name: str, structured: Any, wishes: ServerRequest) -> None:
    wishes.structured = read_structured(structured)
    wishes.form_fields.append(name)


def read_format(value: Any, wishes: ServerRequest) -> None:
    """Read `response_format` of the chat endpoint."""
    kind = _kind_of(value, {"type", "json_schema"})
    if kind == "json_schema":
        _ask("response_format", _of_schema(value.get("json_schema")), wishes)
    elif kind == "json_object" and len(value) == 1:
        _ask("response_format", _ANY_OBJECT, wishes)
    elif kind != "text" or len(value) > 1:
        raise ValueError


def read_text(value: Any, wishes: ServerRequest) -> None:
    """Read `text` of the Responses API."""
    if not isinstance(value, dict):
        raise TypeError
    if not {*value} <= {"format"}:
        raise ValueError
    if (given := value.get("format")) is None:
        return
    kind = _kind_of(given, {"type", *_OF_SCHEMA})
    if kind == "json_schema":
        _ask("text", _of_schema({name: part for name, part in given.items() if name != "type"}), wishes)
    elif kind == "json_object" and len(given) == 1:
        _ask("text", _ANY_OBJECT, wishes)
    elif kind != "text" or len(given) > 1:
        raise ValueError


def read_outputs(value: Any, wishes: ServerRequest) -> None:
    """Read vLLM's `structured_outputs`."""
    given = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else {}
    spaces = {"any_whitespace": given.pop("disable_any_whitespace", False) is False}
    if len(given) != 1:
        raise ValueError
    [(name, part)] = given.items()
    if name == "json_object" and part is True:
        _ask("structured_outputs", {"json_schema": {"type": "object"}, **spaces}, wishes)
    elif name in _KINDS:
        _ask("structured_outputs", {_KINDS[name]: part, **(spaces if name == "json" else {})}, wishes)
    else:
        raise ValueError


def guided(kind: str) -> Callable[[Any, ServerRequest], None]:
    """Return a reader of vLLM's older `guided_{kind}` field."""

    def read(value: Any, wishes: ServerRequest) -> None:
        _ask(f"guided_{kind}", {_KINDS[kind]: value}, wishes)

    return read


def read_tool_choice(value: Any, wishes: ServerRequest) -> None:
    """Read which tools an answer may call or must call."""
    if isinstance(value, dict):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if value.get("type") != "function" or not isinstance(name, str):
            raise ValueError
        wishes.must_call = name
    elif value == "required":
        wishes.must_call = ""
    elif value not in ("auto", "none"):
        raise ValueError
    wishes.may_call_tools = value != "none"


def check_forms(body: dict[str, Any], wishes: ServerRequest) -> None:
    """Raise RefusedRequestError if the structured-output and tool fields of a body contradict each other."""

    def refuse(name: str, expected: str) -> None:
        raise RefusedRequestError(f"{name}={body[name]!r:.200}: expected {expected}")

    names = wishes.form_fields
    if len(names) > 1:
        refuse(names[1], f"it left out beside {names[0]}")
    if wishes.must_call is not None:
        known = [_function(tool)["name"] for tool in wishes.tools]
        if not known:
            refuse("tool_choice", "tools beside it, one of which is to be called")
        if wishes.must_call and wishes.must_call not in known:
            refuse("tool_choice", f"the name of one of the tools, {', '.join(known)}")
    if names and wishes.has_tools:
        refuse(names[0], "it left out beside tools that may be called (tool_choice 'none': they are not)")


def ask_for_calls(wishes: ServerRequest, template: dict[str, Any] | None) -> None:
    """Constrain the answer to calls of the tools in `tool_choice`, if the request requires a call.

    Args:
        template: transformers' response template of the model, or None.

    Raises:
        RefusedRequestError: If the model does not write its calls as JSON between two fixed texts.
    """
    if wishes.must_call is None:
        return
    field = ((template or {}).get("fields") or {}).get("tool_calls") or {}
    begin = field.get("open") or _literal(field.get("open_pattern"))
    end = field.get("close") or _literal(field.get("close_pattern"))
    is_json = field.get("content") == "json" and (field.get("transform") or {}).get("function") == "{content}"
    if not (begin and end and is_json):
        raise RefusedRequestError("tool_choice: expected 'auto' or 'none', since this model writes its calls in a form "
                                  "that is not enforced")
    tools = [_function(tool) for tool in wishes.tools]
    tags = [
        {
            "begin": f'{begin}\n{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}},
            "end": f"}}\n{end}",
        }
        for tool in tools if wishes.must_call in ("", tool["name"])
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True,
            "stop_after_first": bool(wishes.must_call) or not wishes.parallel_calls}
    wishes.structured = Structured(STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))
    wishes.form_fields = ["tools"]


async def compiled_form(wishes: ServerRequest, model: Any, tokenizer: Any) -> Form:
    """Compile the grammar of the request's structured output while other requests run.

    Raises:
        RefusedRequestError: If no grammar can be compiled from the request.
    """
    structured = wishes.structured
    if structured is None:
        return NO_FORM
    try:
        # In a thread: the first grammar reads the whole vocabulary, which would block the event loop.
        grammar = await asyncio.to_thread(_begin, structured, model, tokenizer)
        return Form(structured, await asyncio.wrap_future(grammar))
    except (ValueError, TypeError, ImportError) as error:
        why = error.why if isinstance(error, FormError) else str(error)
        raise RefusedRequestError(f"{wishes.form_fields[0]}: {why}") from error


def _begin(structured: Structured, model: Any, tokenizer: Any) -> Future[Any]:
    enable_once(model)
    if not is_enabled(model):
        raise ValueError("expected it left out, since hf_paged does not run this model")
    return get_engine(model).begin_grammar(structured, tokenizer)


def _kind_of(value: Any, known: set[str]) -> str:
    if not isinstance(value, dict) or not {*value} <= known or not isinstance(value.get("type"), str):
        raise ValueError
    return str(value["type"])


def _of_schema(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not {*given} <= _OF_SCHEMA or not isinstance(given.get("schema"), (dict, bool)):
        raise ValueError
    return {"json_schema": given["schema"], **_COMPACT}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tool.get("function", tool)
    return found


def _literal(pattern: Any) -> str | None:
    """Return the literal text of a pattern without leading white space; None if it matches more than one text."""
    text = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    return text if text and not _SPECIAL & {*text} else None
