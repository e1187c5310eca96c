"""Compilation of a form of outputs by xgrammar in this process, with a check that some output has the form.

Imports neither torch nor transformers: a process that only compiles starts without them.
"""

from __future__ import annotations

import json
from typing import Any

from hf_paged.options.structured import STRUCTURAL_TAG, Structured, choices_as_grammar

STACK_BYTES = 4 << 20  # stack of a compilation; a thread that compiles an accepted form again has twice as much
# Types of expressions in xgrammar's serialized grammars of these layouts, of 0.2.8 and 0.2.9.
_LAYOUTS = "v16", "v18"
_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8


def compile_form(xgrammar: Any, compiler: Any, structured: Structured) -> Any:
    """Return the `xgrammar.CompiledGrammar` of a form.

    Args:
        xgrammar: the package.
        compiler: the package's `GrammarCompiler` for the vocabulary.

    Raises:
        ValueError: no text has the form.
        RuntimeError, UnicodeEncodeError: xgrammar cannot make a grammar of the form.
    """
    kind, text, any_whitespace = structured
    if kind == "json_schema":
        _check_has_text(xgrammar.Grammar.from_json_schema(text, any_whitespace=any_whitespace))
        return compiler.compile_json_schema(text, any_whitespace=any_whitespace)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == STRUCTURAL_TAG:
        _check_has_text(xgrammar.Grammar.from_structural_tag(text))
        return compiler.compile_structural_tag(text)
    grammar = text if kind == "grammar" else choices_as_grammar(json.loads(text))
    if kind == "grammar":
        _check_has_text(xgrammar.Grammar.from_ebnf(grammar))
    return compiler.compile_grammar(grammar)


def said(error: BaseException) -> str:
    """Return an error message of xgrammar without its time and its place in the C++ source."""
    text = " ".join(str(error).split())
    return text.partition(".cc:")[2].partition(": ")[2] or text or type(error).__name__


def _check_has_text(grammar: Any) -> None:
    if not has_text(grammar.serialize_json()):
        raise ValueError("no output that ends has this form, since a rule or schema needs itself inside of itself")


def has_text(serialized: str) -> bool:
    """Return whether a grammar that xgrammar has serialized produces any finite text.

    A rule produces one if one of its choices needs only rules that do. True for a grammar of another layout, and an
    expression of another type than above counts as producing a text.
    """
    try:
        made = json.loads(serialized)
        if made["__VERSION__"] not in _LAYOUTS:
            return True
        data, bodies = made["grammar_expr_data"], [rule[1] for rule in made["rules"]]
        needs: list[int] = []  # for each expression, how many of its parts still have to produce a text
        waiting: dict[int, list[int]] = {}
        for number, at in enumerate(made["grammar_expr_indptr"]):
            count, parts = _needed(data[at], data[at + 2 : at + 2 + data[at + 1]], bodies)
            needs.append(count)
            for part in parts:
                waiting.setdefault(part, []).append(number)
        found = [number for number, count in enumerate(needs) if count == 0]
        for number in found:
            for other in waiting.get(number, ()):
                needs[other] -= 1
                if needs[other] == 0:
                    found.append(other)
        return bodies[made["root_rule_id"]] in set(found)
    except (ValueError, KeyError, IndexError, TypeError):
        return True


def _needed(kind: int, parts: list[int], bodies: list[int]) -> tuple[int, list[int]]:
    """Return how many of which other expressions have to produce a text before this expression does."""
    if kind == _SEQUENCE:
        return len(parts), parts
    if kind == _CHOICES:
        return 1, parts
    if kind == _RULE or (kind == _REPEAT and parts[1] > 0):
        return 1, [bodies[parts[0]]]
    return 0, []
