"""Prints the reasons for which something is not done natively and that docs/troubleshooting.md does not have.

    python tools/reasons.py [--all]

A reason is a text that some function of the package returns, or hands to `announce_fallback` or `fall_back`, in place
of what it was asked for: one whose result is annotated as `str | None`, or as `str` or something else. What the code
puts into the text is written as `…`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ANNOUNCING = {"announce_fallback", "fall_back"}


def template(node: ast.expr) -> str | None:
    """The text of a literal, with … for what is put in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None else left + (right or "…")
    if isinstance(node, ast.IfExp):
        return template(node.body) or template(node.orelse)
    return None


def gives_reasons(function: ast.FunctionDef) -> bool:
    """Is the result a text or something else?"""
    kinds = ast.unparse(function.returns).replace("Iterator[", "").rstrip("]") if function.returns else ""
    return "str" in kinds.split(" | ") and "|" in kinds


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every reason that a module gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and gives_reasons(node):
            given = [inner.value for inner in ast.walk(node) if isinstance(inner, (ast.Return, ast.Yield))]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ANNOUNCING:
            given = list(node.args)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("reason", "call"):
            given = [node.value]
        else:
            continue
        yield from (text for value in given if value is not None and (text := template(value)) is not None)


def reasons() -> list[str]:
    """Every reason that the package gives, in the order of its files."""
    found: dict[str, None] = {}
    for path in sorted((ROOT / "hf_paged").rglob("*.py")):
        found |= dict.fromkeys(texts_of(ast.parse(path.read_text())))
    return [text for text in found if set(" =") & set(text.strip("… "))]


def missing() -> list[str]:
    """Reasons that the page does not have, line breaks apart."""
    page = " ".join(PAGE.read_text().split())
    return [text for text in reasons() if " ".join(text.split()) not in page]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all reasons, whether the page has them or not")
    found = reasons() if parser.parse_args().all else missing()
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
