"""The benchmark of GRPO steps: on a CPU as one command, what it says of a row, and of an engine that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import grpo
import pytest

SCRIPT = Path(grpo.__file__)
ROW = {"model": "0.6B", "step": 6.0, "rollout": 2.0, "log-probs": 0.5, "update": 3.5, "weight sync": 0.0,
       "rollout tok/s": 32768.0, "peak_gib": {"rollout": 20.0, "log-probs": 18.0, "update": 15.0}, "ready_s": 11.6}
OURS = ROW | {"engine": "ours", "paths": {"native": 4}, "reasons": []}
VLLM = ROW | {"engine": "vllm", "step": 9.0, "rollout": 4.0, "weight sync": 0.25,
              "peak_gib": {"rollout": 50.0, "update": 9.0}}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="an extra of the test environment")
def test_end_to_end_on_a_cpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent)
    options = ["--models", "tiny", "--device", "cpu", "--scale", "0.02", "--warmup", "1", "--steps", "2",
               "--engines", "ours", "stock", "--out", str(tmp_path)]
    shown = subprocess.run([sys.executable, str(SCRIPT), *options], env=environment, text=True, check=True,
                           capture_output=True, timeout=300).stdout
    report = json.loads((tmp_path / "grpo.json").read_text())
    assert report["workload"] == {"prompts": 2, "samples": 2, "prompt_tokens": 10, "new_tokens": 10}
    ours, stock = report["rows"]
    assert (ours["engine"], stock["engine"]) == ("ours", "stock")
    assert ours["paths"] == {"native": 3} and ours["reasons"] == []
    for row in (ours, stock):
        assert len(row["steps"]) == len(row["losses"]) == 3
        assert row["step"] == pytest.approx(sum(step["step"] for step in row["steps"][1:]) / 2)
        assert row["step"] == pytest.approx(row["rollout"] + row["log-probs"] + row["update"])
        assert row["rollout"] > 0 and row["update"] > 0
        assert row["rollout tok/s"] == pytest.approx(2 * 2 * 10 / row["rollout"])
        assert max(row["peak_gib"].values()) > 0.1
    assert "3 native" in shown and "times as fast a step as stock" in shown


def test_a_row_says_the_peak_its_phase_and_the_paths():
    shown = grpo.cells(OURS)
    assert shown[:9] == ["0.6B", "ours", "6.00", "2.00", "0.50", "3.50", "32,768", "20.0", "12"]
    assert shown[9] == "peak in the rollout, 4 native"
    assert grpo.cells(VLLM)[9] == "peak in the rollout, weight sync 0.25 s"
    assert grpo.cells({"model": "0.6B", "engine": "vllm", "error": "exit 1: no"})[-1] == "exit 1: no"


def test_ours_is_compared_with_each_other_engine_that_ran():
    failed = {"model": "0.6B", "engine": "stock", "error": "exit 1: no"}
    rows = [OURS, VLLM, failed, ROW | {"model": "8B", "engine": "stock"}]
    assert grpo.comparisons(rows) == ["0.6B: ours is 1.50 times as fast a step as vllm, with 40% of its peak memory"]


@pytest.mark.parametrize(("does", "error"), [
    ("print('no luck'); sys.exit(3)", "exit 3: no luck"),
    ("time.sleep(60)", "took longer than 2 s"),
])
def test_an_engine_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch, does, error):
    (tmp_path / "grpo_worker.py").write_text(f"import sys, time; {does}")
    monkeypatch.setattr(grpo, "HERE", tmp_path)
    job = {"engine": "vllm", "model": "tiny"}
    assert grpo.measure(job, tmp_path, 2.0, None) == {"error": error}


def test_figures_count_though_the_process_goes_on(tmp_path, monkeypatch):
    """vLLM's threads may keep it alive."""
    (tmp_path / "grpo_worker.py").write_text(
        "import json, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'step': 1.0}))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(grpo, "HERE", tmp_path)
    assert grpo.measure({"engine": "vllm", "model": "tiny"}, tmp_path, 30.0, None) == {"step": 1.0}
