"""The argument `structured=`: the form that an output must have, checked as far as possible without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

KINDS = ("json_schema", "regex", "choice", "grammar")
EXPECTED = (f"a dict with one of {KINDS}: a JSON schema (a dict, a JSON text, True for any JSON, or a pydantic model; "
            "beside it any_whitespace=False bars line breaks and indents), a regular expression, a list of texts, an "
            "EBNF grammar whose first rule is called root")
_COMPACT = "any_whitespace"
# The kind of xgrammar's structural tags, by which the server describes tool calls.
STRUCTURAL_TAG = "structural_tag"


class FormError(ValueError):
    """A form of outputs cannot be had.

    Attributes:
        why: what is wrong with it, and what is accepted, without the form itself.
    """

    def __init__(self, structured: Structured, why: str) -> None:
        super().__init__(f"structured={{{structured.kind!r}: {structured.text!r:.200}}}: {why}")
        self.why = why


class Structured(NamedTuple):
    """The form of an output: one of `KINDS`, or `STRUCTURAL_TAG`, and its text (a JSON text, but for regex and
    grammar). Equal forms have equal texts. ``any_whitespace``: JSON may have it wherever JSON allows it; otherwise a
    space behind commas and colons, and no other."""

    kind: str
    text: str
    any_whitespace: bool = True


def check_size(structured: Structured, most: int) -> None:
    """Raise FormError for a form whose text has more than ``most`` bytes."""
    size = len(structured.text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise FormError(structured, f"it has {size:,} bytes; expected at most structured_max_bytes={most:,} "
                                    "(PagedConfig)")


def read_structured(structured: Any) -> Structured | None:
    """Return what a caller gave, checked, or None for None; a TypeError or ValueError names what is wrong with it."""
    if structured is None or isinstance(structured, Structured):
        return structured
    if not isinstance(structured, Mapping):
        raise TypeError(f"structured={structured!r:.200}: expected None or {EXPECTED}")
    given = dict(structured)
    any_whitespace = given.pop(_COMPACT, True) if "json_schema" in given else True
    if len(given) != 1 or next(iter(given)) not in KINDS or not isinstance(any_whitespace, bool):
        raise ValueError(f"structured={structured!r:.200}: expected {EXPECTED}")
    [(kind, value)] = given.items()
    try:
        return Structured(kind, _READERS[kind](value), any_whitespace)
    except (TypeError, ValueError) as error:
        raise type(error)(f"structured={{{kind!r}: {value!r:.200}}}: {error}") from error


def _schema(value: Any) -> str:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"expected a JSON text ({error})") from error
    if not isinstance(value, Mapping) and value is not True:
        raise TypeError("expected a JSON schema: a dict, a JSON text of one, True or a pydantic model")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected what JSON can hold ({error})") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got {type(value).__name__}")
    if not value:
        raise ValueError("expected a text that is not empty")
    return str.__str__(value)


def _choices(value: Any) -> str:
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
        raise TypeError("expected a list of texts")
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("expected a list of texts, at least one and none of them empty")
    return json.dumps(list(dict.fromkeys(map(str.__str__, value))), ensure_ascii=False)


_READERS: dict[str, Callable[[Any], str]] = {
    "json_schema": _schema, "regex": _text, "choice": _choices, "grammar": _text,
}


def choices_as_grammar(choices: list[str]) -> str:
    """Return an EBNF grammar of exactly these texts."""

    def escaped(character: str) -> str:
        if character in '"\\':
            return "\\" + character
        return character if character.isprintable() else f"\\U{ord(character):08x}"

    return "root ::= " + " | ".join(f'"{"".join(map(escaped, text))}"' for text in choices)
