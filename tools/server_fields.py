"""Write the table of docs/server_fields.md: every field of a body, and what the server does with it.

    python tools/server_fields.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from generated_page import write_or_check

from hf_paged.server.protocol import BODIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "server_fields.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->"


def done(field: dict[str, Any]) -> str:
    """What the server does with a field: the values that it carries out, or 400 and the reason."""
    text = field["description"].replace("expected it left out: ", "")
    if "no_effect" not in field:
        return re.sub("expected (an? |it to be )?", "", text).partition(": the number")[0]
    if not field["no_effect"]:
        return f"400: {text}"
    passes = ", ".join(f"`{json.dumps(value)}`" for value in field["no_effect"])
    accepted, _, reason = text.removeprefix("expected ").partition(": ")
    reason = reason or ("" if accepted.startswith("'") else accepted)
    return f"400 but for {passes}" + (f": {reason}" if reason else "")


def rows() -> list[tuple[str, str, str]]:
    """(fields, endpoints, what is done), sorted by the first field; fields with equal rows share one."""
    endpoints: dict[tuple[str, str], list[str]] = {}
    for kind in BODIES:
        for name, field in kind.model_json_schema()["properties"].items():
            endpoints.setdefault((name, done(field)), []).append(kind.endpoint)
    fields: dict[tuple[str, str], list[str]] = {}
    for (name, text), found in sorted(endpoints.items()):
        where = "all" if len(found) == len(BODIES) else ", ".join(found)
        fields.setdefault((where, text), []).append(f"`{name}`")
    return [(", ".join(names), where, text) for (where, text), names in fields.items()]


def page() -> str:
    """docs/server_fields.md with the table as it should be."""
    head, rest = PAGE.read_text().split(BEGIN)
    lines = ["| field | endpoints | |", "|---|---|---|"]
    lines += [f"| {fields} | {endpoints} | {text} |" for fields, endpoints, text in rows()]
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def main() -> int:
    return write_or_check(PAGE, page, __doc__)


if __name__ == "__main__":
    sys.exit(main())
