"""The soak script: what it calls a breach, and (slow) some rounds and three minutes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import soak
import torch

ROOT = Path(__file__).resolve().parents[2]
FLAT = {"leaked": 0, "RSS MiB": 500.0, "objects": 400000, "device MiB": 100.0, "graphs dropped": 3}


def _rounds(**growth: float) -> list[dict[str, float]]:
    """Twenty rounds over which figures grow by so much."""
    return [{name: value + growth.get(name, 0) * i / 19 for name, value in FLAT.items()} for i in range(20)]


def test_a_flat_run_has_no_breach():
    assert soak.breaches(SimpleNamespace(wrong=[]), _rounds()) == []


@pytest.mark.parametrize(("name", "growth"), [("RSS MiB", 200.0), ("objects", 40000), ("device MiB", 10.0),
                                              ("graphs dropped", 2), ("leaked", 1)])
def test_growth_is_a_breach(name, growth):
    [breach] = soak.breaches(SimpleNamespace(wrong=[]), _rounds(**{name: growth}))
    assert name.split()[0] in breach


def test_a_wrong_result_is_a_breach():
    with pytest.raises(AssertionError, match="stock gives"):
        soak.same(torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(AssertionError, match="stock gives"):
        soak.same(ValueError, TypeError)
    with pytest.raises(AssertionError, match="stock gives"):
        soak.same(torch.tensor([1]), ValueError)
    assert soak.breaches(SimpleNamespace(wrong=["native (seed 1): ..."], done=Counter()), _rounds()) != []


def _soak(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks/soak.py"), *arguments], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": path}, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_some_rounds_have_no_breach():
    output = _soak("--seconds", "3", "--no-server")
    assert "no breach" in output and "running manager" in output


@pytest.mark.slow
def test_three_minutes_have_no_breach():
    output = _soak("--seconds", "180")
    assert "no breach" in output and "server" in output
