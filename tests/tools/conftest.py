"""What tests of tools/ share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch):
    """Imports a file of tools/."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module
