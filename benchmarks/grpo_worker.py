"""Run the GRPO steps of one engine, in a process of its own that grpo.py starts.

    python benchmarks/grpo_worker.py job.json figures.json
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PHASES = ("rollout", "log-probs", "update")


class PeakMemory:
    """The most memory in use during each phase, in bytes, looked at every 10 ms from `start` to `stop`.

    On a GPU all that the device has in use, since vLLM's pool, graphs and CUDA's context are not in torch's statistics
    (from NVML, which may be asked while another thread captures a graph); without one this process's resident memory.
    """

    def __init__(self, device: str) -> None:
        self.phase, self.peaks = "update", dict.fromkeys(PHASES, 0)
        self._used = torch.cuda.device_memory_used if device == "cuda" else _resident_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            phase = self.phase
            self.peaks[phase] = max(self.peaks[phase], self._used())

    def start(self) -> None:
        self._used()  # what raises should do so here
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Clock(TrainerCallback):
    """Seconds of each phase of every step: one dict a step, whose "step" is the whole of it."""

    def __init__(self, device: str) -> None:
        self.steps: list[dict[str, float]] = []
        self.memory = PeakMemory(device)
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._begin = 0.0

    def now(self) -> float:
        self._wait()
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append(dict.fromkeys(("step", *PHASES, "weight sync"), 0.0))
        self._begin, self.memory.phase = self.now(), "update"

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step = self.steps[-1]
        step["step"] = self.now() - self._begin
        step["update"] = step["step"] - step["rollout"] - step["log-probs"]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds in here count for `name`; "weight sync" is a part of the rollout."""
        before, start = self.memory.phase, self.now()
        if name in PHASES:
            self.memory.phase = name
        try:
            yield
        finally:
            self.steps[-1][name] += self.now() - start
            self.memory.phase = before

    def watch(self, owner: Any, method: str, name: str, only: Callable[[], bool] = lambda: True) -> None:
        """Calls of `owner.method` are a phase of their own, while `only()`."""
        inner = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not only():
                return inner(*args, **kwargs)
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, method, watched)


def prompts(job: dict[str, Any], vocab_size: int) -> list[str]:
    """Each prompt of every step another one: no step finds its prompts in a cache. A word of the tokenizer a token."""
    random.seed(0)
    count = job["prompts"] * (job["warmup"] + job["steps"])
    return [" ".join(f"t{random.randrange(2, vocab_size)}" for _ in range(job["prompt_tokens"])) for _ in range(count)]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between the samples of a prompt, so that every step has gradients."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def config(job: dict[str, Any], folder: str) -> GRPOConfig:
    """TRL's defaults; the workload's sizes; EOS is ignored."""
    length, samples = job["new_tokens"], job["prompts"] * job["samples"]
    rows = min(job["micro_batch"], samples)
    options: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": length}}
    if job["engine"] == "vllm":
        options = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": job["prompt_tokens"] + length, "generation_kwargs": {"ignore_eos": True},
        }
    return GRPOConfig(
        output_dir=folder, per_device_train_batch_size=rows, gradient_accumulation_steps=samples // rows,
        num_generations=job["samples"], max_completion_length=length, max_steps=job["warmup"] + job["steps"],
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        use_cpu=job["device"] == "cpu", **options,
    )


def set_sleep_level(trainer: GRPOTrainer, level: int) -> None:
    """TRL puts vLLM to sleep at level 2 (its weights are dropped); at level 1 they go to the host and come back."""
    llm = trainer.vllm_generation.llm
    sleep = llm.sleep
    llm.sleep = lambda **_: sleep(level=level)


def own_figures(trainer: GRPOTrainer) -> dict[str, Any]:
    """What the engine counted; paths say whether it was the engine that made the tokens."""
    import hf_paged

    stats = hf_paged.get_engine(trainer.model).stats()
    figures = {
        "paths": {path: counted.num_calls for path, counted in stats.calls.items() if counted.num_calls},
        "reasons": sorted(reason for counted in stats.calls.values() for reason in counted.by_reason),
        "kv_cache_gib": stats.kv_cache_bytes / 2**30, "graphs_captured": stats.num_graphs_captured,
        "graphs_dropped": stats.num_graphs_dropped, "pool_growths": stats.num_pool_growths,
    }
    if hasattr(stats, "shadow_bytes"):
        figures["shadow_gib"] = stats.shadow_bytes / 2**30
    return figures


def run(job: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    ours = job["engine"] == "ours"
    if ours:
        import hf_paged

        hf_paged.install()
    clock = Clock(job["device"])
    vocab_size = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["vocab_size"]
    trainer = GRPOTrainer(
        model=job["checkpoint"], reward_funcs=reward, args=config(job, job["folder"]), callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts(job, vocab_size)]),
        peft_config=_lora() if job["lora"] else None,
    )
    clock.watch(trainer, "_generate", "rollout")
    # The loss's own log-probs are a part of the update.
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "log-probs", lambda: not torch.is_grad_enabled())
    if job["engine"] == "vllm":
        clock.watch(trainer.vllm_generation, "sync_weights", "weight sync")
        if job["sleep_level"] != 2:
            set_sleep_level(trainer, job["sleep_level"])
    if ours and job["release"]:
        release_after_rollouts(trainer)
    ready = time.perf_counter() - start
    clock.memory.start()
    trainer.train()
    clock.memory.stop()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "step_time" in entry]
    if any(length != job["new_tokens"] for length in lengths):
        raise AssertionError(f"completions of {lengths} tokens on average: expected {job['new_tokens']}")
    steps = clock.steps[job["warmup"] :]
    figures: dict[str, Any] = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    figures["rollout tok/s"] = job["prompts"] * job["samples"] * job["new_tokens"] / figures["rollout"]
    figures["peak_gib"] = {phase: peak / 2**30 for phase, peak in clock.memory.peaks.items()}
    figures |= {"ready_s": ready, "steps": clock.steps,
                "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    return figures | (own_figures(trainer) if ours else {})


def release_after_rollouts(trainer: GRPOTrainer) -> None:
    """The KV pool is given back before the update, as vLLM's sleep gives back its own."""
    import hf_paged

    generate = trainer._generate

    def generate_and_release(prompts: list[Any]) -> Any:
        made = generate(prompts)
        hf_paged.get_engine(trainer.model).release_memory()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return made

    trainer._generate = generate_and_release


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


if __name__ == "__main__":
    found = run(json.loads(Path(sys.argv[1]).read_text()))
    written = Path(sys.argv[2] + ".part")
    written.write_text(json.dumps(found, indent=1))
    written.rename(sys.argv[2])  # whole, as soon as it is there
