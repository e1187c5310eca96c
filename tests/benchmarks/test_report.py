"""docs/performance.md is what report.py makes of the JSON of one visit."""

from __future__ import annotations

import json
import sys

import pytest
import report
import workloads

RUN = {
    "date": "2026-01-02T03:04:05+00:00", "machine": "a card", "commit": "abc1234", "versions": {"torch": "2.11.0"},
    "command": ["benchmarks/run_all.py", "--models", "8B", "--out", "/somewhere"], "settings": {"runs": 3},
    "ceilings": {"copy_tb_s": 3.03, "gemm_tflop_s": 700.4},
    "rows": [
        {"row": i, "workload": workload, "model": "8B", "engine": engine, "overrides": overrides, **figures}
        for i, (workload, engine, overrides, figures) in enumerate([
            ("nano", "ours", {}, {"tok_s": 9000.0, "of_floor": 0.8, "ready_s": 1.25, "peak_gib": 70.0}),
            ("nano", "vllm", {}, {"tok_s": 10000.0, "of_floor": 0.9, "ready_s": None, "peak_gib": 70.0}),
            ("single", "ours", {}, {"tok_s": 200.0, "of_floor": 0.9}),
            ("single", "vllm", {}, {"error": "not installed"}),
            ("single", "ours", {"overlap": False}, {"tok_s": 160.0, "of_floor": 0.7}),
            ("batch 8", "ours", {}, {"tok_s": 800.0, "of_floor": 0.5}),
            ("nano", "ours-autocast", {}, {"tok_s": 7000.0, "of_floor": 0.7}),
        ])
    ],
}


def written(folder, **changes):
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(RUN | changes))
    return path


def test_the_committed_page_is_made_of_the_committed_visit(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 0, "run: python benchmarks/report.py"


def test_a_page_has_a_table_a_topic_with_its_command_and_its_weak_rows(tmp_path):
    page = report.render(report.collect([written(tmp_path)]))
    for text in (
        "a card, commit abc1234, 2026-01-02", "copy ran at 3.03 TB/s, a GEMM at 700 TFLOP/s",
        "| 8B | nano | 9,000 | 0.80 | 10,000 | 0.90 |", "| 8B | single | 200 | 0.90 | not installed |  |",
        "Weak: 8B nano.", "*nano*: 256 requests", "| 8B | 8 requests | 800 | 0.50 |", "Weak: 8B 8 requests.",
        "## Workloads, fp32 weights under bf16 autocast", "| 8B | nano | 7,000 | 0.70 |",
        "| 8B | single | `overlap=False` | 160 | 1.25 |", "| 8B | hf_paged | nano | 1.2 | 70.0 |",
    ):
        assert text in page, text
    assert page.count("`python benchmarks/run_all.py --models 8B`") == page.count("\n## ") == 5
    assert "/somewhere" not in page


def test_two_files_of_a_visit_share_the_headings(tmp_path):
    other = [row | {"model": "0.6B"} for row in RUN["rows"] if not row["overrides"]]
    page = report.render(report.collect([written(tmp_path), written(tmp_path, rows=other)]))
    assert page.count("## Workloads\n") == 1 and page.count("| model | workload | hf_paged | of floor | vLLM |") == 2


def test_tables_of_other_scripts_are_taken_as_they_are(tmp_path):
    other = {"title": "Sums over GPUs", "command": "python benchmarks/all_reduce_speed.py", "machine": "a card",
             "commit": "abc1234", "columns": ["rows", "us"], "rows": [["1", "5.0"]], "note": "NCCL: 10.4."}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    page = report.render(report.collect([written(tmp_path), path]))
    assert "## Sums over GPUs\n\n| rows | us |\n|---|---|\n| 1 | 5.0 |\n\n`python benchmarks/all_red" in page
    assert page.endswith("NCCL: 10.4.\n")


@pytest.mark.parametrize("changes", [{"machine": "another card"}, {"commit": "fff0000"}, {"commit": None}])
def test_files_of_two_visits_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected the same in all files of a visit"):
        report.collect([written(tmp_path), written(tmp_path, **changes)])


def test_every_workload_is_described():
    assert report.WORKLOADS.keys() == workloads.WORKLOADS.keys()
