"""Sizes and words of the package and its docs: a figure here may fall, and rises only for a reason of the commit.

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
MOST_LINES, MOST_FILES = 59_000, 349
# A file of more lines is several ideas. Those that are: what they may have at most.
MOST_LINES_OF_A_FILE = 700
LONG_FILES: dict[str, int] = {}
MOST_FILES_IN_A_FOLDER = 15
FULL_FOLDERS = {"models": 16}
# Words that name no thing of the code (who does it, to whom is it told?), in docstrings and comments.
VAGUE = ("nobody", "somebody", "whoever", "told", "asked")
MOST_VAGUE = {"nobody": 7, "somebody": 0, "whoever": 5, "told": 1, "asked": 7}

# Words of pages: a page that grows by a remark with each change is not read. A new page needs a limit here.
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
MOST_WORDS_OF_DOCS = 38_650
MOST_WORDS_OF_A_DESIGN_PAGE = 450
MOST_WORDS = {
    "README.md": 700, "CONTRIBUTING.md": 1_500, "CHANGELOG.md": 1_000, "docs/adapters.md": 475, "docs/api.md": 5_262,
    "docs/architecture.md": 2_000, "docs/async.md": 525, "docs/callers.md": 1_000, "docs/command_line.md": 440,
    "docs/data_parallel.md": 550, "docs/design/guards.md": 650,
    "docs/extending.md": 1_560, "docs/from_vllm.md": 1_300, "docs/metrics.md": 675,
    "docs/models.md": 1_300,
    "docs/notebook.md": 1_500, "docs/observing.md": 650, "docs/options.md": 700, "docs/parallel.md": 500,
    "docs/performance.md": 1_500, "docs/reinforcement_learning.md": 1_100, "docs/server.md": 1_025,
    "docs/server_fields.md": 1_025, "docs/sharded_trainers.md": 550, "docs/structured.md": 775,
    "docs/troubleshooting.md": 2_693,
}
# The figures have a time; every other page is of today.
DATED = {"docs/performance.md"}
A_DATE = re.compile(r"\b20\d\d-\d\d|\b(?:January|February|March|April|May|June|July|August|September|October|November"
                    r"|December) 20")


# A class that keeps three of these in its fields holds a request, whatever its name is.
OF_A_REQUEST = {
    "adapter", "adapter_name", "adapter_names", "adapters", "cache_salt", "edits", "eos_token_id", "eos_token_ids",
    "generation_config", "logprobs", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "options",
    "output_token_ids", "priority", "prompt", "prompt_length", "prompt_logprobs", "prompt_token_ids", "prompts",
    "request_id", "request_ids", "seed", "stop", "stop_strings", "stop_token_ids", "structured", "temperature",
    "timeout", "top_k", "top_logprobs",
}
MOST_REQUEST_TYPES = 9
COLUMNS = {"SamplingRows", "IntSettings", "FloatSettings"}  # of tables on the device, and so of many requests
# Data whose class is named like a request's, and is of something else.
OTHER_DATA = {"AttentionOptions", "AttentionSpec", "CallShape", "CallStats", "CountedCall", "GraphCall", "KVSpec"}


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


def test_one_function_forks_the_process_of_the_tests():
    """`support.in_child`, which collects garbage before and tells where a child hangs; scripts fork their own."""
    scripts = re.compile(r"_script\.py$")
    found = {path.name for path in (ROOT / "tests").rglob("*.py")
             if not scripts.search(path.name) and re.search(r"^\s.*\bos\.fork\(\)", path.read_text(), re.M)}
    assert found == {"support.py"}


def test_modules_of_tests_have_names_of_their_own():
    """By which pytest imports them: of two it collects one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_helper_of_tests_is_imported_from_the_module_that_has_it():
    """A helper that moves is then missed in all modules that use it, before any of them runs."""
    trees = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    imports = {name: [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
               for name, tree in trees.items()}
    taken = {name: {alias.asname or alias.name for node in nodes for alias in node.names}
             for name, nodes in imports.items()}
    found = [(name, alias.name) for name, nodes in imports.items() for node in nodes for alias in node.names
             if not node.module.startswith("hf_paged.") and alias.name in taken.get(node.module.split(".")[-1], ())]
    assert found == []


def words(page: Path) -> int:
    return len(page.read_text().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_read(page):
    name = str(page.relative_to(ROOT))
    most = MOST_WORDS.get(name, MOST_WORDS_OF_A_DESIGN_PAGE if page.parent.name == "design" else None)
    assert most is not None and words(page) <= most


def test_the_docs_stay_small():
    counts = {str(page.relative_to(ROOT)): words(page) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sum(counts.values()) <= MOST_WORDS_OF_DOCS, counts


def test_no_page_is_a_diary():
    dated = {str(page.relative_to(ROOT)): found[0] for page in PAGES if (found := A_DATE.search(page.read_text()))}
    assert dated.keys() <= DATED, dated


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_a_sentence(page):
    """A list, a table or a command in front of the first sentence leaves open what the page is for."""
    heading, text = page.read_text().split("\n\n")[:2]
    if page.parent.name == "design" and text.startswith("## Problem"):
        text = page.read_text().split("\n\n")[2]
    assert heading.startswith("# ") and re.match(r"\*?\w|`", text) and "." in text, text[:80]


# Of transformers' server: the functions that know how models write reasoning and calls of tools.
PARSERS = {"ReasoningText", "ToolCall", "build_response_parser", "get_response_template", "parse_assistant_message",
           "response_events_to_chunks"}


def test_the_server_replaces_nothing_of_transformers():
    """It imports functions that parse answers, and sets no attribute of what it imports."""
    found = set()
    for path in [*(PACKAGE / "server").glob("*.py"), PACKAGE / "serve.py"]:
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        found |= {alias.name for node in imports if node.module.startswith("transformers.cli") for alias in node.names}
        names = {alias.asname or alias.name for node in imports if node.module.split(".")[0] in (
            "transformers", "uvicorn", "fastapi", "starlette") for alias in node.names}
        assert not any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"
                       and getattr(node.args[0], "id", "") in names for node in ast.walk(tree)), path
        assert not any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                       and getattr(node.value, "id", "") in names for node in ast.walk(tree)), path
    assert found == PARSERS


def fields_of(node: ast.ClassDef) -> set[str]:
    """The annotated fields of a class, and the attributes that its `__init__` sets."""
    found = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            found |= {target.attr.strip("_") for target in ast.walk(one)
                      if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)}
    return found


def is_data(node: ast.ClassDef) -> bool:
    made = [ast.unparse(one) for one in (*node.bases, *node.decorator_list)]
    return any(re.match("NamedTuple|dataclass|dataclasses.dataclass", one) for one in made)


def test_a_request_passes_through_few_types():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("## The types of a request") : page.index("## The life of a request")]
    chain = dict(re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", table, re.MULTILINE))
    classes = {(node.name, str(path.relative_to(PACKAGE))): node for path in FILES
               for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
    assert chain.items() <= classes.keys() and len(chain) <= MOST_REQUEST_TYPES, chain
    holding = {name for (name, _), node in classes.items() if len(fields_of(node) & OF_A_REQUEST) >= 3}
    keywords = {name for name, path in classes if path == "options/keywords.py"}
    assert holding - keywords - COLUMNS <= chain.keys()
    named = {name for (name, path), node in classes.items() if is_data(node)
             and re.search("Request|Call|Slot|Settings|Options|Spec", name)}
    assert named - COLUMNS - OTHER_DATA <= chain.keys()
