"""The benchmark of one long request, on a CPU with a tiny model: what it counts adds up."""

from __future__ import annotations

import json

import pytest
from floors import costs_of, floor
from long_context import main
from workloads import YARN, Workload, limits, make_workload, qwen3_config


def test_chunks_add_up_to_the_prompt_and_their_floors_to_its_floor(tmp_path, capsys):
    sizes = {"prompt": 700, "chunk": 128, "each": 256, "new": 6}
    options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    figures = main(["--model", "tiny", "--device", "cpu", *options, "--out", str(tmp_path / "long.json")])
    assert json.loads((tmp_path / "long.json").read_text()) == figures
    chunks = figures["chunks"]
    assert [(chunk["cached"], chunk["new"]) for chunk in chunks] == [(i * 128, 128) for i in range(5)] + [(640, 60)]
    least = floor(Workload([[1] * 700], [6], 0.0), qwen3_config("tiny"), 4, figures["ceilings"])
    assert sum(chunk["floor_s"] for chunk in chunks) == pytest.approx(least.prefill)
    assert all(chunk["seconds"] > 0 for chunk in chunks)
    decode = figures["decode"]
    assert 5 * decode["floor_ms"] == pytest.approx(1e3 * (least.weights + least.kv), rel=0.01)
    assert 1 / decode["tok_s"] == pytest.approx(decode["median_ms"] / 1e3)
    assert 0 < decode["median_ms"] <= decode["slowest_ms"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in printed[2:6]] == [
        ["0", "-", "256"], ["256", "-", "512"], ["512", "-", "700"], ["0", "-", "700"],
    ]


def test_the_hosts_part_is_told_for_a_short_context_and_for_the_whole(capsys):
    main(["--model", "tiny", "--device", "cpu", "--prompt", "2000", "--chunk", "512", "--new", "5", "--host"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1000", "tokens:"]] * 2 + [["2000", "tokens:"]] * 2
    assert all("slowest decode step" in line and ", chunk " in line for line in lines)


def test_flops_of_a_chunk_are_those_of_each_of_its_tokens():
    costs = costs_of(qwen3_config("tiny"), 4)
    assert costs.flops(7, 9, 1) == 2 * costs.head + sum(2 * costs.in_layers + costs.flops_of_key * n for n in (8, 9))


def test_long_sequences_ask_for_their_length_and_others_for_nothing():
    assert limits(make_workload("long")) == {"max_model_len": 131_200}
    assert limits(make_workload("nano")) == {}
    assert qwen3_config("8B", YARN).rope_parameters == YARN | {"rope_theta": 1e6}
