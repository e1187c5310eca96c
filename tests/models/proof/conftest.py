"""Proofs of tests are stored in a folder of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def stored_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proofs"
