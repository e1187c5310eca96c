"""examples/grpo.py: it learns, its rollouts are the engine's, and sharded it trains as without hf_paged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from module_files import load_module

pytest.importorskip("trl", reason="an extra of the test environment")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "grpo.py"
# A few steps over two processes, with hf_paged or without. Rollouts are greedy and of questions that the model was
# trained on, with margins far above the noise of bf16, so that both runs compare; an entropy bonus moves the weights.
SHARDED = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import torch
import grpo

folder, kind = sys.argv[1:]
if kind == "stock":
    grpo.hf_paged.install = lambda: None
grpo.QUESTIONS = ["What is 41 + 3?", "What is 52 + 6?", "What is 13 + 8?", "What is 77 + 4?"]
options = {{"generation_kwargs": {{"do_sample": False}}, "entropy_coef": 0.1, "learning_rate": 2e-4}}
trainer = grpo.train(3, fsdp2=True, output=folder + "/trainer", **options)
weights = {{name: weight.full_tensor() for name, weight in trainer.model.state_dict().items()}}
kept = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
log = [[entry[name] for name in kept] for entry in trainer.state.log_history if "reward" in entry]
if trainer.accelerator.is_main_process:
    head = trainer.model.lm_head.weight
    torch.save({{"weights": weights, "log": log, "shard": head.to_local().numel() / head.numel()}}, folder + "/" + kind)
    if kind == "ours":
        print(grpo.report(trainer))
torch.distributed.destroy_process_group()
"""


def _run(command: list[str], **environment: str) -> str:
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _rewards(printed: str) -> tuple[float, float]:
    first, last = re.search(r"reward: (\S+) -> (\S+)", printed).groups()
    return float(first), float(last)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--lora"]], ids=["all weights", "LoRA"])
def test_it_learns_with_rollouts_of_the_engine(options):
    printed = _run([sys.executable, str(EXAMPLE), "--steps", "25", *options])
    first, last = _rewards(printed)
    assert last > 1.4 * first > 0, printed
    assert "rollouts: 25 native\n" in printed


@pytest.mark.slow
def test_sharded_over_two_processes_it_trains_as_without_hf_paged(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
              str(tmp_path / "sharded.py"), str(tmp_path)]
    _run([*launch, "stock"], CUDA_VISIBLE_DEVICES="")
    printed = _run([*launch, "ours"], CUDA_VISIBLE_DEVICES="")
    stock, ours = (torch.load(tmp_path / kind) for kind in ("stock", "ours"))
    assert "rollouts: 3 native\n" in printed
    assert ours["log"] == stock["log"] and len({str(entry) for entry in stock["log"]}) == 3
    assert list(ours["weights"]) == list(stock["weights"])
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in stock["weights"].items())
    assert stock["shard"] == 0.5


@pytest.fixture(scope="module")
def example():
    return load_module(EXAMPLE)


def test_the_reward_is_for_an_animal_and_nothing_else(example):
    said = ["red-fox 4821", "fox", "owl swan", "amber", "", "shark tiger shark mint"]
    rewards = example.one_animal([[{"role": "assistant", "content": text}] for text in said])
    assert rewards == [1 / 3, 1.0, 1 / 2, 0.0, 0.0, 1 / 4]
