"""Writes docs/api.md from the docstrings of the public names.

    python tools/api_docs.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_page import write_or_check

import hf_paged
from hf_paged import ray_data

PATH = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# Public names

`python tools/api_docs.py` writes this page from the docstrings; a test compares them. Every name below is to be had as
`hf_paged.NAME`, and those of the last section as `hf_paged.ray_data.NAME`.
"""
# The rest of what an engine has is there for the folders above it.
SHOWN = {"Engine": ("add_request", "step", "abort", "has_unfinished", "stats", "draw_cache", "reset_prefix_cache",
                    "release_memory")}
SECTIONS = "Args", "Returns", "Raises", "Attributes", "Yields"


def parts() -> Iterator[tuple[str, list[Any]]]:
    """The page's sections: a heading, and the objects under it."""
    names = [getattr(hf_paged, name) for name in hf_paged.__all__]
    yield "Functions", [thing for thing in names if inspect.isfunction(thing)]
    errors = [thing for thing in names if inspect.isclass(thing) and issubclass(thing, Exception)]
    yield "Classes", [thing for thing in names if inspect.isclass(thing) and thing not in errors]
    yield "Errors and warnings", errors
    yield "Ray Data", [ray_data.generate_dataset, ray_data.PagedActor, ray_data.row_seed]


def signature(function: Any) -> str:
    """As the source has it, but for decorators and `self`; with the keywords that `with_keywords` shows."""
    if hasattr(function, "__signature__"):
        return shown(function.__signature__)
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        del node.args.args[0]
    result = "" if node.returns is None or function.__name__ == "__init__" else f" -> {ast.unparse(node.returns)}"
    return f"({ast.unparse(node.args)}){result}"


def shown(given: inspect.Signature) -> str:
    """A signature whose annotations are texts, without `self`."""
    parts, is_open = [], True
    for one in [*given.parameters.values()][1:]:
        if one.kind is one.KEYWORD_ONLY and is_open:
            parts.append("*")
            is_open = False
        name = f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name
        default = "" if one.default is one.empty else f"={one.default!r}"
        parts.append(f"{name}: {one.annotation}{default}")
    return f"({', '.join(parts)}) -> {given.return_annotation}"


def text_of(thing: Any) -> str:
    """A docstring as markdown: its sections become lists."""
    lines, section = [], None
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            lines += [f"*{section}*", ""]
        elif section in ("Args", "Attributes", "Raises") and (item := re.match(r"    (\S[^:]*): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section is not None and line.startswith("    "):
            lines.append(f"  {line.strip()}" if section in ("Args", "Attributes", "Raises") else line.strip())
        else:
            section = None if line else section
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def members(kind: type) -> Iterator[str]:
    """Public methods and properties that have a docstring, in the order of the source."""
    for name, value in vars(kind).items():
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if name.startswith("_") or name not in SHOWN.get(kind.__name__, (name,)) or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            yield f"#### `{kind.__name__}.{name}`\n\n{text_of(value)}"
        elif inspect.isfunction(value):
            call = f"{kind.__name__}.{name}{signature(value)}"
            yield f"#### `{kind.__name__}.{name}`\n\n{block(call)}\n{text_of(value)}"


def block(call: str) -> str:
    """A call as code, one argument a line where it is long."""
    if len(call) > 100:
        head, rest = call.split("(", 1)
        arguments, _, result = rest.rpartition(")")
        call = "\n".join([f"{head}(", *(f"    {line}," for line in split_arguments(arguments)), f"){result}"])
    return f"```python\n{call}\n```\n"


def split_arguments(arguments: str) -> list[str]:
    """At the commas that stand in no bracket."""
    found, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def call_of(kind: type) -> str:
    """How an object of this class is made; nothing for an exception."""
    own = vars(kind).get("__init__")
    if dataclasses.is_dataclass(kind):
        fields = [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}"
                  for f in dataclasses.fields(kind)]
        return block(f"{kind.__name__}({', '.join(fields)})") + "\n"
    return block(kind.__name__ + signature(own)) + "\n" if inspect.isfunction(own) else ""


def entry(thing: Any) -> str:
    """One public name."""
    if inspect.isfunction(thing):
        return f"### `{thing.__name__}`\n\n{block(thing.__name__ + signature(thing))}\n{text_of(thing)}"
    return "\n".join([f"### `{thing.__name__}`\n\n{call_of(thing)}{text_of(thing)}", *members(thing)])


def render() -> str:
    """The whole page."""
    sections = [f"## {heading}\n\n" + "\n".join(map(entry, things)) for heading, things in parts()]
    return "\n".join([HEAD, *sections])


def main() -> int:
    return write_or_check(PATH, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
