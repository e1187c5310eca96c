"""The form of an answer: the body fields that request it, and the compilation of its grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hf_paged.engine.engine import Engine
from hf_paged.integration.recognise.structured import NO_FORM, Form
from hf_paged.options.structured import FormError, Structured, read_structured
from hf_paged.server.errors import RefusedRequestError

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
EXPECTED_GUIDED = {
    "json": "expected a JSON schema, as an object or a string", "regex": "expected a regular expression",
    "choice": "expected a list of strings, none of them empty",
    "grammar": "expected an EBNF grammar whose first rule is called root",
}


def read_format(value: Any) -> Structured | None:
    """Read `response_format` of the chat endpoint; raises ValueError for a wrong value, as all functions here."""
    kind, more = _typed(value)
    if kind == "json_schema" and more.keys() == {"json_schema"}:
        return _of_schema(more["json_schema"])
    return _of_kind(kind, more)


def read_text_format(value: Any) -> Structured | None:
    """Read `text` of the Responses API."""
    if not isinstance(value, dict) or not {*value} <= {"format"}:
        raise ValueError
    if value.get("format") is None:
        return None
    kind, more = _typed(value["format"])
    return _of_schema(more) if kind == "json_schema" else _of_kind(kind, more)


def read_outputs(value: Any) -> Structured | None:
    """Read vLLM's `structured_outputs`."""
    given = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else {}
    is_compact = given.pop("disable_any_whitespace", False)
    if not isinstance(is_compact, bool) or len(given) != 1:
        raise ValueError
    [(name, part)] = given.items()
    if name == "json_object" and part is True:
        name, part = "json", {"type": "object"}
    if name not in _KINDS or (is_compact and name != "json"):  # the only form with white space of its own
        raise ValueError
    return _read({_KINDS[name]: part, **({"any_whitespace": not is_compact} if name == "json" else {})})


def guided(kind: str) -> Callable[[Any], Structured | None]:
    """Return a reader of vLLM's older `guided_{kind}` field."""
    return lambda value: _read({_KINDS[kind]: value})


async def compiled_form(wanted: tuple[str, Structured] | None, engine: Engine | None, tokenizer: Any) -> Form:
    """Compile the grammar of an answer while other requests run.

    Args:
        wanted: the body field that requests the form, and the form; None for an answer without one.
        engine: the engine of the model, or None.

    Raises:
        RefusedRequestError: no grammar can be compiled.
    """
    if wanted is None:
        return NO_FORM
    field, structured = wanted
    if engine is None:
        raise RefusedRequestError(f"{field}: expected it left out, since hf_paged does not run this model")
    try:
        # In a thread: the first grammar reads the whole vocabulary, which would block the event loop.
        grammar: Future[Any] = await asyncio.to_thread(engine.begin_grammar, structured, tokenizer)
        return Form(structured, await asyncio.wrap_future(grammar))
    except (ValueError, TypeError, ImportError) as error:
        why = error.why if isinstance(error, FormError) else str(error)
        raise RefusedRequestError(f"{field}: {why}") from error


def _read(given: dict[str, Any]) -> Structured | None:
    try:
        return read_structured(given)
    except TypeError as error:  # which pydantic would not take for the value's fault
        raise ValueError(str(error)) from error


def _typed(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the type of an object, and its other fields."""
    if not isinstance(value, dict):
        raise ValueError
    more = dict(value)
    return more.pop("type", None), more


def _of_kind(kind: Any, more: dict[str, Any]) -> Structured | None:
    if kind not in ("text", "json_object") or more:
        raise ValueError
    return _read(_ANY_OBJECT) if kind == "json_object" else None


def _of_schema(given: Any) -> Structured | None:
    if not isinstance(given, dict) or not {*given} <= _OF_SCHEMA or not isinstance(given.get("schema"), (dict, bool)):
        raise ValueError
    return _read({"json_schema": given["schema"], **_COMPACT})
