"""Write the picture of the layers into docs/architecture.md, from the imports in hf_paged/.

    python tools/layers_picture.py [--check]

An arrow goes from a folder (or a file at the top) to one that it imports, unless a longer way leads there. Imports for
type checking alone do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/layers_picture.py -->\n", "<!-- end -->\n"


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, at its top or inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


def graph() -> dict[str, set[str]]:
    """By folder of the package, or file at its top: which of them it imports."""
    package = ROOT / "hf_paged"
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    arrows: dict[str, set[str]] = {room: set() for room in rooms - {"__init__"}}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room in arrows:
            names = [name.split(".") for name in imported(ast.parse(path.read_text()))]
            arrows[room] |= {name[1] for name in names if name[0] == "hf_paged" and len(name) > 1}
    return {room: (targets & arrows.keys()) - {room} for room, targets in arrows.items()}


def below(room: str, arrows: dict[str, set[str]]) -> set[str]:
    """All that can be reached from a room."""
    found: set[str] = set()
    open_ = [*arrows[room]]
    while open_:
        if (target := open_.pop()) not in found:
            found.add(target)
            open_ += arrows[target]
    return found


def render() -> str:
    """The picture in mermaid."""
    arrows = graph()
    shown = {room: {target for target in targets
                    if not any(target in below(other, arrows) for other in targets - {target})}
             for room, targets in arrows.items()}
    heights = {room: len(below(room, arrows)) for room in arrows}
    lines = ["```mermaid", "flowchart TD"]
    for room in sorted(arrows, key=lambda room: (-heights[room], room)):
        is_file = (ROOT / "hf_paged" / f"{room}.py").exists()
        lines.append(f"    {room}{'([' if is_file else '['}{room}{'.py])' if is_file else '/]'}")
        lines += [f"    {room} --> {target}" for target in sorted(shown[room])]
    return "\n".join([*lines, "```"]) + "\n"


def page() -> str:
    """docs/architecture.md with the picture as it should be."""
    head, rest = PAGE.read_text().split(BEGIN)
    return head + BEGIN + render() + END + rest.split(END)[1]


def main() -> int:
    return write_or_check(PAGE, page, __doc__)


if __name__ == "__main__":
    sys.exit(main())
