"""Prints the reasons for which something is not done natively and that docs/troubleshooting.md does not have.

    python tools/reasons.py [--all]

A reason is a `Reason` of hf_paged.errors: the page has a row with its text and its remedy. What the code puts in is
written as `…`. Other texts that some function returns in place of what it was asked for have to be on the page, too:
those of a function whose result is annotated as `str | None`, or as `str` or something else.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"


def template(node: ast.expr, constants: Mapping[str, str] = {}) -> str | None:
    """The text of a literal or of a name among `constants`, with … for what is put in; None for anything else."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
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
    """Every text that a module's functions return in place of what they are asked for, but for a `Reason`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and gives_reasons(node):
            given = [inner.value for inner in ast.walk(node) if isinstance(inner, (ast.Return, ast.Yield))]
            yield from (text for value in given if value is not None and (text := template(value)) is not None)


def constants_of(trees: list[ast.Module]) -> dict[str, str]:
    """By name, the texts that modules have as constants."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    texts = {ast.unparse(node.targets[0]): template(node.value) for node in assigned}
    return {name: text for name, text in texts.items() if text is not None}


def reasons_of(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(kind, remedy) of every `Reason` that a module makes.

    Raises:
        ValueError: one whose text or remedy is neither a literal nor one of `constants`.
    """
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason"):
            continue
        remedy = next((keyword.value for keyword in node.keywords if keyword.arg == "remedy"), None)
        kind = template(node.args[0], constants)
        what = None if remedy is None else template(remedy, constants)
        if kind is None or what is None:
            raise ValueError(f"line {node.lineno}: expected literals: {ast.unparse(node)}")
        yield re.sub(r"\{\d*\}", "…", kind), what


def found() -> tuple[dict[str, str], list[str]]:
    """What the package has, in the order of its files: remedies of reasons by their kind, and the other texts."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "hf_paged").rglob("*.py"))]
    constants = constants_of(trees)
    remedies = dict(pair for tree in trees for pair in reasons_of(tree, constants))
    others = dict.fromkeys(text for tree in trees for text in texts_of(tree))
    return remedies, [text for text in others if set(" =") & set(text.strip("… "))]


def missing(page: str | None = None) -> list[str]:
    """Reasons of which no row of the page has both text and remedy, and other texts that it does not have."""
    page = PAGE.read_text() if page is None else page
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("|")]
    remedies, others = found()
    lacking = [
        f"`{kind}` | {remedy}" for kind, remedy in remedies.items()
        if not any(f"`{kind}`" in row[0] and remedy in row[-1] for row in rows)
    ]
    flat = " ".join(page.split())
    return lacking + [text for text in others if " ".join(text.split()) not in flat]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all reasons, whether the page has them or not")
    texts = missing("") if parser.parse_args().all else missing()
    print(*texts, sep="\n")
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
