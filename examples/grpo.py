"""Train with TRL's GRPO, rollouts on the paged engine: a program of TRL's and one line more. A minute on a CPU.

    python examples/grpo.py                                # fp32 weights under bf16 autocast, as TRL trains by default
    python examples/grpo.py --lora                         # adapters alone are trained
    torchrun --nproc_per_node 2 examples/grpo.py --fsdp2   # weights sharded over two processes, without a GPU, too

The prompt wants an animal, and the tiny model rambles; the reward is for an animal and nothing else. The last lines are
the rewards and the paths that the rollouts took.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import hf_paged

MODEL = str(Path(__file__).parent / "models" / "tiny-qwen3")
QUESTIONS = ["Name an animal.", "Say an animal.", "Which animal?", "An animal, please."]
ANIMALS = (
    "ant ape bat bear bee bird bison boar camel cat clam cod cow crab crane crow deer dog dove duck eagle eel elk emu "
    "finch fish fly fox frog goat goose gull hare hawk hen heron horse ibex koala lark lion llama lynx mole moose moth "
    "mouse mule newt otter owl panda pig pony quail rat raven robin seal shark sheep snail swan tiger"
)


def one_animal(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """1 for an animal alone, less the more is said beside it, 0 without one."""
    answers = [completion[0]["content"].replace("-", " ").split() for completion in completions]
    return [any(word in ANIMALS.split() for word in words) / max(1, len(words)) for words in answers]


def train(steps: int, *, lora: bool = False, fsdp2: bool = False, output: str = "grpo", **options: Any) -> GRPOTrainer:
    """`options`: further settings of TRL's."""
    hf_paged.install()  # the policy is enabled at its first rollout

    settings: dict[str, Any] = {
        "output_dir": output, "max_steps": steps, "learning_rate": 2e-3 if lora else 1e-4, "max_completion_length": 24,
        "gradient_accumulation_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(),
    }
    if fsdp2:
        settings |= {"fsdp": True, "fsdp_config": {"version": 2}}
    config = GRPOConfig(**(settings | options))
    if fsdp2 and not torch.cuda.is_available():  # accelerate shards over what it takes for several GPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=one_animal,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS * 4]),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.train()
    return trainer


def report(trainer: GRPOTrainer) -> str:
    """Rewards of the first and of the last tenth of the steps, and how many rollouts took which path."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    tenth = max(1, len(rewards) // 10)
    calls = hf_paged.get_engine(trainer.model).stats().calls
    paths = [f"{counted.num_calls} {path}" for path, counted in calls.items() if counted.num_calls]
    reasons = [f"  {path}: {reason}" for path, counted in calls.items() for reason in counted.by_reason]
    return "\n".join([f"reward: {sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}",
                      f"rollouts: {', '.join(paths)}", *reasons])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fsdp2", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(args.steps, lora=args.lora, fsdp2=args.fsdp2, output=folder)
    if trainer.accelerator.is_main_process:
        print(report(trainer))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
