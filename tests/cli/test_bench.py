"""Throughput and latency of a model, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_paged
from hf_paged.cli import main

TRAINED = str(Path(hf_paged.__file__).resolve().parents[1] / "examples/models/tiny-qwen3")
COMMON = ["--device", "cpu", "--dtype", "float32", "--prompt-tokens", "12", "--output-tokens", "6"]


def test_throughput_counts_all_tokens(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["bench", "throughput", TRAINED, *COMMON, "--num-prompts", "10", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["output_tokens_per_second"] == pytest.approx(60 / report["seconds"])
    assert report["total_tokens_per_second"] == pytest.approx((60 + 120) / report["seconds"])
    assert "10.00 requests/s" not in (said := capsys.readouterr().out) and "output tokens/s" in said


def test_latency_is_that_of_the_rounds(tmp_path):
    path = tmp_path / "report.json"
    assert main(["bench", "latency", TRAINED, *COMMON, "--batch-size", "2", "--rounds", "3", "--set", "max_num_seqs=2",
                 "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert 0 < report["seconds"]["p50"] <= report["seconds"]["p90"] <= report["seconds"]["p99"]
    assert report["batch_size"] == 2 and report["rounds"] == 3


def test_prompts_that_do_not_fit_are_an_error(capsys):
    assert main(["bench", "latency", TRAINED, *COMMON, "--set", "max_model_len=10"]) == 2
    assert "max_model_len" in capsys.readouterr().err
