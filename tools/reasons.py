"""Print the reasons for which something is not done natively that docs/troubleshooting.md does not have.

    python tools/reasons.py [--all]

A reason is a `Reason` of hf_paged.errors. The page has an item for it: a part of its text as code, a colon, and at
least one sentence of its remedy (a warning shows all of it). What the code fills in is written as `…`. The page also
has a part of each text that a function returns in place of a result: the functions whose result is annotated as
`str | None`, or as `str` or something else.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders whose texts stand behind "is not proved to run" and the like.
VERDICTS = ("proof", "checks", "derivation")
PAGE = ROOT / "docs" / "troubleshooting.md"
LEAST_LETTERS = 9  # a shorter text of the page is a part of too many reasons


def template(node: ast.expr, constants: Mapping[str, str] = {}) -> str | None:
    """Return the text of a literal or of a name among `constants`, with … for what is filled in; else None."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return constants.get(node.id if isinstance(node, ast.Name) else node.attr)
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
    """Return whether the result of a function is a text or something else."""
    kinds = ast.unparse(function.returns).replace("Iterator[", "").rstrip("]") if function.returns else ""
    return "str" in kinds.split(" | ") and "|" in kinds


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts that functions of a module return in place of a result, except for a `Reason`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and gives_reasons(node):
            given = [inner.value for inner in ast.walk(node) if isinstance(inner, (ast.Return, ast.Yield))]
            yield from (text for value in given if value is not None and (text := template(value)) is not None)


def constants_of(trees: list[ast.Module]) -> dict[str, str]:
    """Return the texts that modules have as constants, by name."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    texts = {ast.unparse(node.targets[0]): template(node.value) for node in assigned}
    return {name: text for name, text in texts.items() if text is not None}


def reasons_of(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, remedy) of every `Reason` that a module makes.

    Raises:
        ValueError: the text or remedy of a reason is neither a literal nor one of `constants`.
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
    """Return the remedies of the package's reasons by kind, and the other texts, in the order of its files."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "hf_paged").rglob("*.py"))}
    constants = constants_of(list(trees.values()))
    remedies = dict(pair for tree in trees.values() for pair in reasons_of(tree, constants))
    others = dict.fromkeys(text for path, tree in trees.items() if path.parent.name not in VERDICTS
                           for text in texts_of(tree))
    return remedies, [text for text in others if set(" =") & set(text.strip("… "))]


def items(page: str) -> list[tuple[list[str], str]]:
    """Return each item of the page's lists: the texts as code in front of its colon, and what follows the colon."""
    lines = re.findall(r"^\* (.*?[`)]): (.*)$", page, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", head), rest) for head, rest in lines]


def is_part(part: str, text: str) -> bool:
    """Return whether a text that the page shows is a part of a reason, and long enough to find it by."""
    return part == text or (len(part.strip("… ")) >= LEAST_LETTERS and part.strip("… ") in text)


def missing(page: str | None = None) -> list[str]:
    """Return the reasons of which no item of the page has text and remedy, and the other texts that it lacks."""
    page = PAGE.read_text() if page is None else page
    known = items(page)
    remedies, others = found()
    lacking = [
        f"`{kind}`: {remedy}" for kind, remedy in remedies.items()
        if not any(any(is_part(part, kind) for part in parts) and any(one in rest for one in sentences(remedy))
                   for parts, rest in known)
    ]
    shown = re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", page))
    return lacking + [text for text in others if not any(is_part(part, text) for part in shown)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a remedy."""
    return re.split(r"(?<=\.) (?=[A-Z`])", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all reasons, whether the page has them or not")
    texts = missing("") if parser.parse_args().all else missing()
    print(*texts, sep="\n")
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
