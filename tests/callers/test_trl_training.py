"""TRL's trainers as they come, over an enabled model: their training is bitwise that of a run without hf_paged.

Rollouts are sampled, so the run without hf_paged is given those of the run with it. Whether they are right is a check
of its own: every token is among the most likely of stock's forward under the same autocast, with the weights of the
moment.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import assert_same_tensor, num_calls
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

import hf_paged

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", reason="an extra of the test environment")
online_dpo = pytest.importorskip("trl.experimental.online_dpo")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("no_accelerator_left")
QUESTIONS = ["Name an animal.", "Say an animal.", "Which animal?", "An animal, please.", "What is 47 + 8?", "amber"]
STEPS, NEW_TOKENS, TOP_K = 3, 10, 4
# Whether a training step is in bf16 autocast is left to the trainers' defaults: it is.
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": 3e-3, "logging_steps": 1, "save_steps": STEPS, "report_to": [], "seed": 0,
    "use_cpu": True, "disable_tqdm": True,
}
NOT_OF_THE_RUN = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


class Rollout(NamedTuple):
    inputs: dict[str, Any]
    output: torch.Tensor
    weights: dict[str, torch.Tensor]  # as they were then
    random_state: torch.Tensor  # of torch's default generator, afterwards


class Recorder(TrainerCallback):
    """Gradients of all parameters before every optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})


class Run(NamedTuple):
    trainer: Any
    gradients: list[dict[str, torch.Tensor | None]]
    checkpoint: Path


def _distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(set(map(int, ids)))) for ids in completion_ids]


def _grpo(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Run:
    settings = COMMON | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": NEW_TOKENS,
                         "generation_kwargs": {"top_k": TOP_K}, "gradient_accumulation_steps": 2} | options
    return _run(trl.GRPOTrainer, trl.GRPOConfig, model, tokenizer, folder, settings)


def _rloo(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Run:
    settings = COMMON | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": NEW_TOKENS,
                         "generation_kwargs": {"top_k": TOP_K}, "gradient_accumulation_steps": 2} | options
    return _run(trl.RLOOTrainer, trl.RLOOConfig, model, tokenizer, folder, settings)


def _online_dpo(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Run:
    settings = COMMON | {"per_device_train_batch_size": 4, "max_new_tokens": NEW_TOKENS, "top_k": TOP_K} | options
    return _run(online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig, model, tokenizer, folder, settings)


def _run(trainer_class: Any, config_class: Any, model: Any, tokenizer: Any, folder: Path, settings: dict) -> Run:
    peft_config, recorder = settings.pop("peft_config", None), Recorder()
    torch.manual_seed(3)  # LoRA's random half
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
    trainer = trainer_class(
        model, reward_funcs=_distinct_tokens, args=config_class(str(folder), **settings), processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows), peft_config=peft_config, callbacks=[recorder],
    )
    trainer.train()
    return Run(trainer, recorder.gradients, folder / f"checkpoint-{STEPS}")


def _recorded(model: PreTrainedModel) -> list[Rollout]:
    """From now on the calls of `model.generate`."""
    rollouts: list[Rollout] = []

    def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert not args
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        output = type(model).generate(model, **kwargs)
        rollouts.append(Rollout(kwargs, output.clone(), weights, torch.get_rng_state()))
        return output

    model.generate = generate
    return rollouts


def _replay(model: PreTrainedModel, rollouts: list[Rollout]) -> None:
    """Calls of `model.generate` give what others gave, if they are called with the same.

    They leave the generator as those did: the trainer shuffles with it.
    """
    left = iter(rollouts)

    def generate(**kwargs: Any) -> torch.Tensor:
        rollout = next(left)
        assert_same_tensor(kwargs["input_ids"], rollout.inputs["input_ids"])
        assert_same_tensor(kwargs["attention_mask"], rollout.inputs["attention_mask"])
        torch.set_rng_state(rollout.random_state)
        return rollout.output.clone()

    model.generate = generate


def _unlikely(rollout: Rollout, weights: dict[str, torch.Tensor], stock: PreTrainedModel, autocast: bool) -> int:
    """Tokens of a rollout that are not among the top k of stock's forward, up to twice the rounding of bf16 logits."""
    stock.load_state_dict(weights)
    width = rollout.inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(rollout.inputs["attention_mask"], (0, rollout.output.shape[1] - width), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = stock(rollout.output, attention_mask=mask, position_ids=positions).logits[:, width - 1 : -1].float()
    chosen = rollout.output[:, width:]
    worst = logits.topk(TOP_K).values[..., -1]
    slack = worst.abs() * (2**-7 if autocast or next(stock.parameters()).dtype is torch.bfloat16 else 1e-5) + 1e-4
    low = logits.gather(2, chosen[..., None])[..., 0] < worst - slack
    is_eos = (chosen == stock.generation_config.eos_token_id).int()
    return int((low & (is_eos.cumsum(1) == is_eos)).sum())  # the first EOS included, padding left out


def _assert_same_training(ours: Run, stock: Run) -> None:
    """Bitwise: what was logged, gradients of every step, weights, the optimizer's state, and what was saved."""
    logged = [[{k: v for k, v in entry.items() if k not in NOT_OF_THE_RUN} for entry in run.trainer.state.log_history]
              for run in (ours, stock)]
    assert str(logged[0]) == str(logged[1])  # NaN included
    assert len(ours.gradients) == len(stock.gradients) == STEPS
    # Not of the last step alone: GRPO has no gradient where all answers to a prompt are rewarded alike.
    assert any(g is not None and g.any() for step in ours.gradients for g in step.values())
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        _assert_same(a, b)
    _assert_same(ours.trainer.model.state_dict(), stock.trainer.model.state_dict())
    _assert_same(ours.trainer.optimizer.state_dict(), stock.trainer.optimizer.state_dict())
    names = [sorted(p.name for p in run.checkpoint.iterdir()) for run in (ours, stock)]
    assert names[0] == names[1] and any(name.endswith(".safetensors") for name in names[0])
    for name in names[0]:
        a, b = ours.checkpoint / name, stock.checkpoint / name
        if name.endswith((".pt", ".pth")):
            _assert_same(*(torch.load(path, weights_only=False) for path in (a, b)))
        elif name.endswith((".safetensors", ".json")) and name != "trainer_state.json":  # which has times
            assert a.read_bytes() == b.read_bytes(), name


def _assert_same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            _assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            _assert_same(one, other, f"{path}/{index}")
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), path
    else:
        assert a == b, path


LORA = {"r": 4, "lora_alpha": 64, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
FP32, BF16 = torch.float32, torch.bfloat16
# trainer, dtype of the weights, options, and whether rollouts run under autocast. With LoRA accelerate's wrapper is
# around the PeftModel, whose generate calls the model inside.
CASES: dict[str, tuple[Callable[..., Run], torch.dtype, dict[str, Any], bool]] = {
    "GRPO": (_grpo, FP32, {}, True),
    "GRPO, no checkpointing": (_grpo, FP32, {"gradient_checkpointing": False}, True),
    "GRPO, reentrant": (_grpo, FP32, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, True),
    "GRPO, fp32 throughout": (_grpo, FP32, {"bf16": False}, False),
    "GRPO, KL and two updates": (_grpo, FP32, {"beta": 0.1, "num_iterations": 2}, True),
    "GRPO, LoRA": (_grpo, FP32, {"peft_config": LORA, "learning_rate": 3e-2}, False),
    "GRPO, LoRA over bf16": (_grpo, BF16, {"peft_config": LORA, "learning_rate": 3e-2, "beta": 0.1}, False),
    "RLOO": (_rloo, FP32, {}, True),
    "RLOO, LoRA": (_rloo, FP32, {"peft_config": LORA, "learning_rate": 3e-2}, False),
    "OnlineDPO": (_online_dpo, FP32, {}, True),
    "OnlineDPO, LoRA": (_online_dpo, FP32, {"peft_config": LORA, "learning_rate": 3e-2}, False),
}


QUICK = ("GRPO", "GRPO, LoRA", "RLOO", "OnlineDPO")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_training_is_bitwise_that_of_a_run_without_hf_paged(case, trained_path, trained_tokenizer, tmp_path):
    train, dtype, options, autocast = CASES[case]
    options = copy.deepcopy(options)
    if "peft_config" in options:
        options["peft_config"] = peft.LoraConfig(**LORA)

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(trained_path, dtype=dtype)

    model, plain = load(), load()
    rollouts = _recorded(model)
    hf_paged.enable(model, strict=True)
    ours = train(model, trained_tokenizer, tmp_path / "ours", **copy.deepcopy(options))
    assert num_calls(model) == {"native": len(rollouts)}
    _replay(plain, rollouts)
    _assert_same_training(ours, train(plain, trained_tokenizer, tmp_path / "stock", **copy.deepcopy(options)))

    stock = load()
    if "peft_config" in options:
        stock = peft.get_peft_model(stock, options["peft_config"]).base_model.model
    made = [_unlikely(rollout, rollout.weights, stock, autocast) for rollout in rollouts]
    assert made == [0] * len(rollouts)
    assert _unlikely(rollouts[-1], rollouts[0].weights, stock, autocast) > 0, "the weights moved too little to tell"
    hf_paged.disable(model)
    assert json.loads((ours.checkpoint / "trainer_state.json").read_text())["global_step"] == STEPS
