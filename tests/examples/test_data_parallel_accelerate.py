"""examples/data_parallel_accelerate.py: what several processes give together is what one generator gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from module_files import load_module

from hf_paged import PagedGenerator

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "data_parallel_accelerate.py"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
# One set of processes for all calls: greedy, sampled, and with fewer prompts than processes.
CALLS = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from accelerate import PartialState
from data_parallel_accelerate import main
folder = sys.argv[1]
main(["--output", folder + "/greedy", "--dtype", "float32"])
main(["--output", folder + "/sampled", "--dtype", "float32", "--temperature", "5", "--seed", "7"])
main(["--output", folder + "/single", "--dtype", "float32", "--prompts", folder + "/prompt.jsonl"])
assert PartialState().num_processes == 2 and str(PartialState().backend) == "gloo"
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path, trained_path):
    """Under accelerate launch (which takes --multi_gpu for "several processes" and finds no GPU: gloo)."""
    (tmp_path / "calls.py").write_text(CALLS)
    noted = json.loads(PROMPTS.read_text().splitlines()[12]) | {"note": "no end\u2028of a line"}
    (tmp_path / "prompt.jsonl").write_text(json.dumps(noted, ensure_ascii=False) + "\n")
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0"]
    done = subprocess.run([*launch, str(tmp_path / "calls.py"), str(tmp_path)], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "16 prompts over 2 process(es)" in done.stderr

    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    with PagedGenerator.from_pretrained(trained_path, dtype="float32") as generator:
        for name, seed, settings in (("greedy", 0, {}), ("sampled", 7, {"do_sample": True, "temperature": 5.0})):
            made = generator.generate([row["prompt"] for row in rows], seed=[seed + i for i in range(len(rows))],
                                      max_new_tokens=32, **settings)
            expected = [row | {"completion": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason,
                               "error": None} for row, c in zip(rows, made, strict=True)]
            found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            assert found == expected, name
            if name == "greedy":
                assert [json.loads((tmp_path / "single").read_text())] == [noted | expected[12]]
                assert expected[12]["completion"] == "47 + 8 = 55"


@pytest.fixture(scope="module")
def example():
    return load_module(EXAMPLE)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_prompts_are_dealt_out_in_turn_the_longest_first(num_processes, example):
    prompts = ["x" * (31 * i % 17) for i in range(17)]  # of every length from 0 to 16, shuffled
    dealt = example.deal(prompts, num_processes)
    assert sorted(dealt) == list(range(17))
    # As split_between_processes cuts: the first processes get one more.
    sizes = [17 // num_processes + (rank < 17 % num_processes) for rank in range(num_processes)]
    for rank, size in enumerate(sizes):
        share = dealt[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        assert [len(prompts[i]) for i in share] == list(range(16 - rank, -1, -num_processes)), size
