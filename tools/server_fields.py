"""Write the table of docs/server.md: every field of a body, and what the server does with it.

    python tools/server_fields.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from generated_page import write_or_check

from hf_paged.server.fields import ALL, REFUSED, passed, readable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "server.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->"


def rows() -> list[tuple[str, str, str]]:
    """(field, endpoints, what is done), sorted by field."""
    found: dict[tuple[str, str], list[str]] = {}
    for endpoint in ALL:
        for name, given in passed(endpoint).items():
            text = f"read by transformers' handler: {given.expected.removeprefix('expected ')}"
            found.setdefault((name, text), []).append(endpoint)
        for name, field in readable(endpoint).items():
            found.setdefault((name, f"carried out: {field.expected.removeprefix('expected ')}"), []).append(endpoint)
        for name, refused in REFUSED.items():
            if endpoint in refused.endpoints:
                passes = ", ".join(f"`{json.dumps(value)}`" for value in refused.passes)
                text = f"nothing is asked for by {passes}; else 400" if passes else "400"
                found.setdefault((name, f"{text}: {refused.expected}"), []).append(endpoint)
    return sorted((name, ", ".join(endpoints), text) for (name, text), endpoints in found.items())


def page() -> str:
    """docs/server.md with the table as it should be."""
    head, rest = PAGE.read_text().split(BEGIN)
    lines = ["| field | endpoints | |", "|---|---|---|"]
    lines += [f"| `{name}` | {endpoints} | {text} |" for name, endpoints, text in rows()]
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def main() -> int:
    return write_or_check(PAGE, page, __doc__)


if __name__ == "__main__":
    sys.exit(main())
