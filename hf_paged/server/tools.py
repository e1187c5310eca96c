"""Tools of a chat: the body fields about them, and a grammar of calls in the model's own syntax."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from transformers.cli.serving.utils import get_response_template

from hf_paged.options.structured import STRUCTURAL_TAG, Structured
from hf_paged.server.errors import RefusedRequestError

_SPECIAL = frozenset("\\.^$*+?{}[]|()")  # metacharacters of a regular expression
EXPECTED_TOOLS = "expected a list of function definitions, each with type 'function' and a name"
EXPECTED_CHOICE = ("expected 'auto', 'none', 'required' or an object of type 'function' with the name of one of the "
                   "tools")


class ToolChoice(NamedTuple):
    """Which tools an answer may call, and which it must call.

    Attributes:
        may_call: the answer may call tools.
        must_call: the name of the tool that the answer must call; "" for any tool, None if no call is required.
    """

    may_call: bool = True
    must_call: str | None = None


ANY_CHOICE = ToolChoice()


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Check a list of function definitions; raises ValueError for a wrong one."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool.get("type") == "function"
                                              and _has_name(function_of(tool)) for tool in value):
        raise ValueError
    return value


def read_choice(value: Any) -> ToolChoice:
    """Read `tool_choice`; raises ValueError for a wrong value."""
    if isinstance(value, dict):
        function = value.get("function", value)
        if value.get("type") != "function" or not _has_name(function):
            raise ValueError
        return ToolChoice(must_call=function["name"])
    if value == "required":
        return ToolChoice(must_call="")
    if value not in ("auto", "none"):
        raise ValueError
    return ToolChoice(may_call=value == "auto")


def function_of(tool: dict[str, Any]) -> Any:
    """Return the definition of a tool's function, which the Responses API has beside the tool's type."""
    return tool.get("function", tool)


def nested(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the format of the chat endpoint, which chat templates read."""
    return [tool if "function" in tool else {"type": "function", "function": {
        name: value for name, value in tool.items() if name != "type"}} for tool in tools]


def check_tools(processor: Any, model: Any) -> None:
    """Raise RefusedRequestError if transformers cannot read the model's tool calls."""
    if get_response_template(processor, model) is None:
        raise RefusedRequestError("tools: expected none, since transformers cannot read the calls of this model "
                                  f"(model_type {model.config.model_type!r}, no response_template of its tokenizer)")


def calls_form(tools: list[dict[str, Any]], must_call: str, parallel: bool,
               template: dict[str, Any] | None) -> Structured:
    """Return the form of an answer that has to call tools.

    Args:
        must_call: as in `ToolChoice`.
        parallel: the answer may make several calls.
        template: transformers' response template of the model, or None.

    Raises:
        RefusedRequestError: the model does not write its calls as JSON between two fixed texts.
    """
    field = ((template or {}).get("fields") or {}).get("tool_calls") or {}
    begin = field.get("open") or _literal(field.get("open_pattern"))
    end = field.get("close") or _literal(field.get("close_pattern"))
    is_json = field.get("content") == "json" and (field.get("transform") or {}).get("function") == "{content}"
    if not (begin and end and is_json):
        raise RefusedRequestError("tool_choice: expected 'auto' or 'none', since this model writes its calls in a form "
                                  "that is not enforced")
    tags = [
        {
            "begin": f'{begin}\n{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}},
            "end": f"}}\n{end}",
        }
        for tool in map(function_of, tools) if must_call in ("", tool["name"])
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True,
            "stop_after_first": bool(must_call) or not parallel}
    return Structured(STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _literal(pattern: Any) -> str | None:
    """Return the literal text of a pattern without leading white space; None if it matches more than one text."""
    text = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    return text if text and not _SPECIAL & {*text} else None
