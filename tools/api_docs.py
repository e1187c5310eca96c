"""Write docs/api.md from the docstrings of the public names.

    python tools/api_docs.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated_page import write_or_check

import hf_paged
from hf_paged import ray_data
from hf_paged.options import keywords

PATH = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# Public names

This page is the reference of the public names, which `python tools/api_docs.py` writes from their docstrings. Each is
`hf_paged.NAME`, those of the last section are `hf_paged.ray_data.NAME`.

An invalid argument raises `ValueError` or `TypeError` before anything runs; the message names the argument, its value
and what is accepted. A function that takes an enabled model raises `ValueError` for one that is not enabled. `config`
and `**overrides` are a `PagedConfig` (None: the defaults) and single fields of it. `help` of a name lists its other
errors and the types of its arguments.
"""
# The rest of what an engine has is there for the folders above it; the methods of a callback are for the trainer.
SHOWN = {"Engine": ("add_request", "step", "abort", "has_unfinished", "stats", "draw_cache", "reset_prefix_cache",
                    "release_memory", "warm_up"), "PagedStatsCallback": ()}
# Names whose page says the rest: only the first paragraph of their docstring is shown.
PAGES = {"trace": "observing", "metrics": "metrics", "PagedStatsCallback": "observing", "agenerate": "async",
         "astream": "async", "load_weights": "reinforcement_learning", "named_weights": "reinforcement_learning",
         "load_adapter": "adapters", "gathered": "sharded_trainers", "row_seed": "data_parallel",
         "weight_update": "reinforcement_learning"}
SECTIONS = "Args", "Returns", "Raises", "Attributes", "Yields"
HIDDEN = "Raises", "Yields"  # sections that HEAD stands for
EXPLAINED = re.compile("settings of the engine|how to run|single fields of `PagedConfig`", re.I)  # likewise
PARAGRAPH = "\n\n"
NOTHING: Mapping[str, str] = {}
KEYWORDS = {keywords.RequestKeywords: "Keywords of all requests", keywords.EngineKeywords: "Keywords of `add_request`",
            keywords.StreamKeywords: "Keywords of a generator", keywords.CallKeywords: "Keyword of completions"}


def parts() -> Iterator[tuple[str, list[Any]]]:
    """Yield the page's sections: a heading, and the objects under it."""
    names = [getattr(hf_paged, name) for name in hf_paged.__all__]
    yield "Functions", [thing for thing in names if inspect.isfunction(thing)]
    yield "Keywords", list(KEYWORDS)
    errors = [thing for thing in names if inspect.isclass(thing) and issubclass(thing, Exception)]
    yield "Classes", [thing for thing in names if inspect.isclass(thing) and thing not in errors]
    yield "Errors and warnings", errors
    yield "Ray Data", [ray_data.generate_dataset, ray_data.PagedActor, ray_data.row_seed]


def own_keywords(kind: type) -> list[str]:
    """Return the keys of a TypedDict that its bases do not have."""
    bases = {name for base in KEYWORDS if base is not kind and set(base.__annotations__) < set(kind.__annotations__)
             for name in base.__annotations__}
    return [name for name in kind.__annotations__ if name not in bases]


SHARED = {name for kind in KEYWORDS for name in own_keywords(kind)}


def taken(function: Any) -> list[type]:
    """Return the groups of keywords that a function takes."""
    if not hasattr(function, "__signature__"):
        return []
    names = inspect.signature(function).parameters
    return [kind for kind in KEYWORDS if set(own_keywords(kind)) <= set(names)]


def signature(function: Any) -> str:
    """Return the arguments and defaults of a function, with `**keywords` for those that the page documents once."""
    parts, is_open = [], True
    given = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    is_partial = bool(taken(function))
    for one in given:
        if is_partial and one.name in SHARED:
            continue
        if one.kind is one.KEYWORD_ONLY and is_open:
            parts.append("*")
            is_open = False
        name = f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name
        parts.append(name if one.default is one.empty else f"{name}={one.default!r}")
    if is_partial and not parts[-1].startswith("**"):
        parts.append("**keywords")
    return f"({', '.join(parts)})"


def text_of(thing: Any, *, defaults: Mapping[str, str] = NOTHING, groups: Sequence[type] = (), page: str = "") -> str:
    """Return a docstring as markdown: its sections become lists.

    Args:
        defaults: defaults to show behind names of arguments or attributes.
        groups: groups of keywords that the page documents in a section of their own.
        page: the page that says the rest; "" shows the whole docstring.
    """
    text = inspect.getdoc(thing) or ""
    if page:
        return f"{text.split(PARAGRAPH)[0]}\nSee [{page}.md]({page}.md).\n"
    lines, section, is_hidden = [], None, False
    for line in text.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section, is_hidden = line.rstrip(":"), line.rstrip(":") in HIDDEN
            if section == "Returns":
                lines += [f"*{section}*", ""]
            if section == "Args" and groups:
                lines += [f"- the keywords of {' and '.join(map(link_to, groups))}"]
        elif section in ("Args", "Attributes", "Raises") and (item := re.match(r"    (\S[^:]*): (.*)", line)):
            is_shared = bool(groups) and set(item[1].split(", ")) <= SHARED
            is_hidden = section in HIDDEN or is_shared or EXPLAINED.match(item[2]) is not None
            names = ", ".join(name + defaults.get(name, "") for name in item[1].split(", "))
            lines += [] if is_hidden else [f"- `{names}`: {item[2]}"]
        elif section is not None and line.startswith("    "):
            more = f"  {line.strip()}" if section in ("Args", "Attributes", "Raises") else line.strip()
            lines += [] if is_hidden else [more]
        else:
            section, is_hidden = None if line else section, bool(is_hidden and not line)
            lines += [line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def link_to(kind: type) -> str:
    """Return a link to the section of a group of keywords."""
    anchor = re.sub(r"[^\w ]", "", KEYWORDS[kind].lower()).replace(" ", "-")
    return f"[{KEYWORDS[kind].partition(' of ')[2]}](#{anchor})"


def members(kind: type) -> Iterator[str]:
    """Yield public methods and properties that have a docstring, in the order of the source."""
    for name, value in vars(kind).items():
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if name.startswith("_") or name not in SHOWN.get(kind.__name__, (name,)) or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            yield f"#### `{kind.__name__}.{name}`\n\n{text_of(value)}"
        elif inspect.isfunction(value):
            text = text_of(value, groups=taken(value), page=PAGES.get(name, ""))
            yield f"#### `{kind.__name__}.{name}{signature(value)}`\n\n{text}"


def defaults_of(kind: type) -> dict[str, str]:
    """Return the defaults that users may replace, by name: of a group of keywords, and of the fields of a config."""
    if kind in KEYWORDS:
        return {name: f"={keywords.DEFAULTS.get(name)!r}" for name in own_keywords(kind)}
    return {one.name: f"={one.default!r}" for one in dataclasses.fields(kind)} if kind is hf_paged.PagedConfig else {}


def entry(thing: Any) -> str:
    """Return the text of one public name, or of one group of keywords."""
    if thing in KEYWORDS:
        return f"### {KEYWORDS[thing]}\n\n{text_of(thing, defaults=defaults_of(thing))}"
    page, call = PAGES.get(thing.__name__, ""), ""
    if inspect.isfunction(thing):
        call = signature(thing)
    elif "__init__" in vars(thing) and not dataclasses.is_dataclass(thing) and not issubclass(thing, Exception):
        call = signature(thing.__init__)
    text = text_of(thing, defaults=defaults_of(thing), page=page)
    members_of = members(thing) if inspect.isclass(thing) else ()
    return "\n".join([f"### `{thing.__name__}{call}`\n\n{text}", *members_of])


def render() -> str:
    """Return the whole page."""
    sections = [f"## {heading}\n\n" + "\n".join(map(entry, things)) for heading, things in parts()]
    return "\n".join([HEAD, *sections])


def main() -> int:
    return write_or_check(PATH, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
