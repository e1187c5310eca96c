"""The import contracts of pyproject.toml: folders are layers, nothing imports upwards, no circle inside a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"


def test_the_import_contracts_are_kept():
    """Imports that only type checkers see count as well."""
    pytest.importorskip("importlinter")
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout
