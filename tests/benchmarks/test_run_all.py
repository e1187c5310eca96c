"""The benchmark as one command on a CPU, and what it makes of engines that are missing, die or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_report
import pytest
import run_all

SCRIPT = Path(run_all.__file__)
WORKER = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
def tell(**event): print(json.dumps(event), file=open(sys.argv[2], "a"), flush=True)
if job["engine"] == "unloadable": sys.exit("no such weights")
tell(event="loaded")
for row in job["rows"]:
    tell(event="begin", row=row["row"])
    if row["does"] == "die": print("out of luck"); sys.stdout.flush(); os._exit(3)
    if row["does"] == "hang": time.sleep(60)
    if row["does"] == "raise": tell(event="row", row=row["row"], error="ValueError: no"); sys.exit(1)
    tell(event="row", row=row["row"], tok_s=7.0)
"""


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent)
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], env=environment, text=True, check=True,
                          capture_output=True, timeout=240).stdout


@pytest.mark.slow
def test_end_to_end_on_a_cpu(tmp_path):
    out = run("--models", "tiny", "--device", "cpu", "--scale", 0.01, "--batches", 4, "--runs", 1, "--out", tmp_path,
              "--workloads", "nano", "warm-prefix", "rollouts", "--engines", "ours", "vllm", "--ab", "overlap")
    report = json.loads((tmp_path / "figures.json").read_text())
    rows = {(row["workload"], bench_report.label(row)): row for row in report["rows"]}
    assert len(rows) == 12
    for name in ("nano", "warm-prefix", "rollouts", "batch 4"):
        assert rows[name, "vllm"]["error"] == "not installed"
        for label in ("ours", "ours, overlap=False"):
            row = rows[name, label]
            assert row["tok_s"] == row["runs"][0] > 0
            assert row["peak_gib"] > 0
            assert 0 < row["of_floor"] <= row["of_floor_unshared"]
    assert rows["nano", "ours"]["ready_s"] > 0
    assert report["ceilings"]["copy_tb_s"] > 0 and report["versions"]["torch"]
    for shown in ("overlap=False", "not installed", "of floor"):
        assert shown in out
    assert (tmp_path / "figures.png").exists() or "matplotlib is not installed" in out


def test_a_row_that_fails_costs_itself_only(tmp_path, monkeypatch):
    (tmp_path / "bench_worker.py").write_text(WORKER)
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    does = ["run", "die", "run", "hang", "raise", "run"]
    job = {"engine": "any", "model": "any", "rows": [{"row": 10 + i, "does": what} for i, what in enumerate(does)]}
    results = run_all.run_job(job, tmp_path, limit=5.0)
    assert [results[row].get("tok_s") for row in (10, 12, 15)] == [7.0] * 3
    assert results[11]["error"] == "exit 3: out of luck"
    assert results[13]["error"] == "took longer than 5 s"
    assert results[14]["error"] == "ValueError: no"


def test_an_engine_that_does_not_load_is_asked_once(tmp_path, monkeypatch):
    (tmp_path / "bench_worker.py").write_text(WORKER)
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    job = {"engine": "unloadable", "model": "any", "rows": [{"row": 0}, {"row": 1}]}
    results = run_all.run_job(job, tmp_path, limit=20.0)
    assert [row["error"] for row in results.values()] == ["exit 1: no such weights"] * 2




REPORT = {
    "date": "2026-11-20T00:00:00+00:00", "machine": "a card", "ceilings": {"copy_tb_s": 4.27, "gemm_tflop_s": 790.0},
    "rows": [
        {"workload": "nano", "model": "0.6B", "engine": "ours", "overrides": {}, "tok_s": 24_391.4,
         "runs": [20_513.0, 24_391.4, 24_678.0], "first_run": 20_513.0, "ready_s": 1.1, "peak_gib": 120.0,
         "of_floor": 0.74, "of_floor_unshared": 0.74, "floor_tok_s": 33_000.0},
        {"workload": "nano", "model": "0.6B", "engine": "vllm", "overrides": {}, "error": "not installed"},
    ],
}


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_with_and_without_rich(capsys, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    bench_report.print_table(REPORT)
    shown = capsys.readouterr().out
    for cell in ("24,391", "20,513 24,391 24,678", "0.74", "vllm 23,350", "not installed"):
        assert cell in shown


def test_the_plot_and_its_absence(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert bench_report.plot(REPORT, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not bench_report.plot(REPORT, tmp_path / "none.png")
