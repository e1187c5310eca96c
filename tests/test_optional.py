"""Each use of an optional package says which extra brings it, where the package is not installed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from hf_paged.optional import EXTRAS, install, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"bench", "callers", "demo", "dev", "interpreter", "more-callers", "test"}
# Without triton, kernels are torch's; of the others the user's own objects are read, or a meter provider of the user's.
WITHOUT_AN_EXTRA = {"triton", "outlines_core", "opentelemetry"}
# Folders and files that are imported, or whose functions are called, behind a `require` elsewhere.
BEHIND_A_CHECK = {"engine/structured/grammars.py": "engine/structured/grammars.py",
                  "engine/structured/matchers.py": "engine/structured/grammars.py",
                  "integration/adapters.py": "integration/adapters.py", "observe/registry.py": "observe/registry.py",
                  "pictures.py": "pictures.py", "ray_data.py": "ray_data.py", "server": "serve.py"}

# Every extra of users: lines of Python that use it.
USES = {
    "flash-attn": "raise_reason(flash_attn_backend.load(package('flash_attn'))[1])",
    "metrics": "generator().metrics()",
    "peft": "generator().load_adapter('one', {}, {})",
    "plot": "generator().engine.draw_cache()",
    "ray": "ray_data.generate_dataset(None, 'nowhere')",
    "serve": "raise SystemExit(serve.main(['nowhere']))",
    "structured": "generator().generate('a', structured={'regex': 'a'}, max_new_tokens=1)",
}
WITHOUT = '''
import contextlib, io, json, sys

class Without:
    """A finder that does not find some packages."""

    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *args):
        return None if name.split(".")[0] in self.names else self.finder.find_spec(name, *args)

packages, uses, path = json.loads(sys.argv[1])
sys.meta_path[:] = [Without(finder, packages) for finder in sys.meta_path]

import functools
import hf_paged
from hf_paged import ray_data, serve
from hf_paged.cli import main
from hf_paged.attention import flash_attn_backend

@functools.cache
def generator():
    return hf_paged.PagedGenerator.from_pretrained(path, dtype="float32")

def package(module):
    return next(one for one in flash_attn_backend.PACKAGES if one.module == module)

def raise_reason(reason):
    raise ImportError(reason)

found = {}
for extra, use in {**uses, "command": "raise SystemExit(main(['serve', 'nowhere']))"}.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            exec(use)
            error = None
        except (Exception, SystemExit) as raised:
            error = raised
    found[extra] = type(error).__name__, str(error), said.getvalue()
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found(trained_path):
    """What every use ends with in a process that has none of the extras: type, message and standard error."""
    packages = sorted({module.split(".")[0] for modules in EXTRAS.values() for module in modules})
    given = json.dumps([packages, USES, trained_path])
    done = subprocess.run([sys.executable, "-c", WITHOUT, given], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_extra_is_known():
    extras = {*PROJECT["optional-dependencies"]} - FOR_DEVELOPERS
    assert {*EXTRAS} == extras == {*USES}


@pytest.mark.parametrize("extra", sorted(USES.keys() - {"serve"}))
def test_a_use_without_its_extra_says_what_to_install(found, extra):
    kind, message, _ = found[extra]
    assert kind == "ImportError" and install(extra) in message and EXTRAS[extra][0].split(".")[0] in message


@pytest.mark.parametrize("start", ["serve", "command"])
def test_the_server_without_its_extra_ends_with_one_line(found, start):
    kind, code, said = found[start]
    assert (kind, code) == ("SystemExit", "2")
    assert len(said.splitlines()) == 1 and install("serve") in said and "fastapi" in said


def test_the_error_names_the_module_and_the_cause(monkeypatch):
    monkeypatch.setitem(EXTRAS, "ray", ("json", "json.data"))
    with pytest.raises(ImportError, match=re.escape("Ray needs the package json.data: pip install 'hf-paged[ray]' (")):
        require("ray", "Ray")


@pytest.mark.slow
def test_every_optional_package_is_imported_behind_a_check():
    """A module that is neither Python's nor a dependency's has to be asked for by `require`."""
    wrong = [f"{path}:{node.lineno} {name}" for path in sorted((ROOT / "hf_paged").rglob("*.py"))
             for node, name, function in _imports(ast.parse(path.read_text()))
             if _is_optional(name) and not _is_checked(path, function)]
    assert not wrong


def _is_optional(name):
    theirs = [one for package in ("torch", "transformers") for one in requires(package) if "extra ==" not in one]
    declared = {re.split(r"[^\w-]", one)[0].replace("-", "_").lower() for one in [*PROJECT["dependencies"], *theirs]}
    return name not in {*sys.stdlib_module_names, *declared, *WITHOUT_AN_EXTRA, "hf_paged"}


def _is_checked(path, function):
    where = path.relative_to(ROOT / "hf_paged").as_posix()
    if any(where.startswith(one) for one in BEHIND_A_CHECK):
        return True
    calls = ast.walk(function) if function is not None else ()
    return any(isinstance(node, ast.Call) and getattr(node.func, "id", None) == "require" for node in calls)


def _imports(tree):
    """Every import that is made at run time: its node, its top-level package and the function around it."""
    def visit(node, function):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            return
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        yield from ((node, name.split(".")[0], function) for name in names)
        inner = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(tree, None)


@pytest.mark.parametrize(("where", "check"), BEHIND_A_CHECK.items())
def test_what_stands_behind_a_check_is_there(where, check):
    assert (ROOT / "hf_paged" / where).exists() and "require(" in (ROOT / "hf_paged" / check).read_text()


def test_the_page_lists_every_extra():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = page.partition("## Packages that only some uses need")[2].splitlines()
    listed = [extra for row in rows if row.startswith("| `") for extra in re.findall(r"hf-paged\[(.+?)\]", row)]
    assert sorted(listed) == sorted(EXTRAS)
