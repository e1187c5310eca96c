"""What `import hf_paged` gives, and what it does not import yet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_paged


def test_every_public_name_is_there_and_has_one_home():
    assert len(set(hf_paged.__all__)) == len(hf_paged.__all__)
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name).__name__ == name
        assert name in dir(hf_paged)
    with pytest.raises(AttributeError, match="module 'hf_paged' has no attribute 'Enginee'"):
        _ = hf_paged.Enginee


def test_a_type_checker_sees_the_names_that_are_there():
    """As public ones, imported as themselves: it does not follow how `__all__` is made."""
    tree = ast.parse(Path(hf_paged.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [(node.module, name.name, name.asname) for node in block.body for name in node.names]
    made = [(module, name, name) for module, names in hf_paged._MODULES.items() for name in names]
    assert ast.unparse(block.test) == "TYPE_CHECKING" and sorted(seen) == sorted(made)


def run(code: str) -> str:
    """What a new process prints that has imported nothing of ours."""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONPATH": ":".join(filter(None, sys.path))})
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.parametrize("module", ["hf_paged", "hf_paged.parallel.worker"])
def test_nothing_slow_is_imported_before_it_is_used(module):
    """A worker watches its parent from the start, and not after the seconds that torch takes."""
    assert run(f"import sys, {module}; print({{'torch', 'transformers', 'triton'}} & set(sys.modules))") == "set()\n"


FIRST_USES = """
import threading, hf_paged
names, failed = ["PagedGenerator", "enable", "Engine", "Completion"], []
def use(name, begin=threading.Barrier(len(names))):
    begin.wait()
    try:
        getattr(hf_paged, name)
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(failed, hf_paged.engine.Engine is hf_paged.Engine, hf_paged.errors.FallbackError is hf_paged.FallbackError)
"""


@pytest.mark.slow
def test_names_and_their_modules_may_be_used_first_by_several_threads_at_once():
    assert run(FIRST_USES) == "[] True True\n"


BESIDE_A_CLONE = "import hf_paged; print(hf_paged.__file__, hf_paged.errors.FallbackError is hf_paged.FallbackError)"


def test_python_in_the_folder_above_a_clone_finds_the_package_in_it(tmp_path):
    """The clone's folder has the package's name, and Python finds it first."""
    root = Path(hf_paged.__file__).resolve().parents[1]
    (tmp_path / "hf_paged").symlink_to(root)
    made = subprocess.run([sys.executable, "-c", BESIDE_A_CLONE], capture_output=True, text=True, cwd=tmp_path, env={})
    assert made.stdout == f"{root / 'hf_paged' / '__init__.py'} True\n", made.stderr
