"""Sizes and words of the package: a figure here may fall, and rises only for a reason that the commit gives.

A file, a folder or a word that is over its limit is named by the failing test.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_paged"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_FILES = 47_600, 335
# A file of more lines is several ideas. Those that are: what they may have at most.
MOST_LINES_OF_A_FILE = 700
LONG_FILES = {"engine/engine.py": 1_230}
MOST_FILES_IN_A_FOLDER = 15
FULL_FOLDERS = {"engine": 31, "guards": 16, "integration": 32, "models": 26, "options": 16, "parallel": 16,
                "runner": 16}
# Words that name no thing of the code (who does it, to whom is it told?), in docstrings and comments.
VAGUE = ("nobody", "somebody", "whoever", "told", "asked")
MOST_VAGUE = {"nobody": 7, "somebody": 0, "whoever": 5, "told": 1, "asked": 7}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@functools.cache
def prose(path: Path) -> str:
    """Docstrings and comments of a file."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*found, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def test_the_package_stays_small():
    assert sum(map(lines, FILES)) <= MOST_LINES and len(FILES) <= MOST_FILES


def test_a_file_is_one_idea():
    long = {str(path.relative_to(PACKAGE)): lines(path) for path in FILES if lines(path) > MOST_LINES_OF_A_FILE}
    assert all(count <= LONG_FILES.get(name, MOST_LINES_OF_A_FILE) for name, count in long.items()), long
    assert long.keys() == LONG_FILES.keys(), "a file that became short leaves LONG_FILES"


def test_a_folder_can_be_read():
    counts = Counter(str(path.parent.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py")
    full = {name: count for name, count in counts.items() if count > MOST_FILES_IN_A_FOLDER}
    assert all(count <= FULL_FOLDERS.get(name, MOST_FILES_IN_A_FOLDER) for name, count in full.items()), full


@pytest.mark.parametrize("word", VAGUE)
def test_prose_names_what_it_speaks_of(word):
    found = {str(path.relative_to(PACKAGE)): count for path in FILES
             if (count := len(re.findall(rf"\b{word}\b", prose(path), re.IGNORECASE)))}
    assert sum(found.values()) <= MOST_VAGUE[word], found


def test_two_files_renew_what_a_fork_leaves_behind():
    """Locks by `process_lock`, engines by their registry: a new lock or engine needs no code of its own."""
    found = {str(path.relative_to(PACKAGE)) for path in FILES if "register_at_fork" in path.read_text()}
    assert found == {"process_lock.py", "engine/engine_registry.py"}
