"""TRL's OnlineDPOTrainer and GKDTrainer: their defaults generate with `use_cache=False`, natively.

Both sample by default. At a temperature near zero the draws are greedy, so that a run compares with one without
hf_paged.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from programs import assert_program, watched_calls
from support import stock_copy
from transformers import AutoModelForCausalLM

import hf_paged

datasets = pytest.importorskip("datasets")
gkd = pytest.importorskip("trl.experimental.gkd", reason="an extra of the test environment")
online_dpo = pytest.importorskip("trl.experimental.online_dpo")

pytestmark = pytest.mark.usefixtures("no_accelerator_left")
QUESTIONS = ["What is 47 + 8?", "Repeat: owl red swan", "bold-fox", "amber"]
STEPS, NEW_TOKENS = 2, 96
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": STEPS, "max_new_tokens": NEW_TOKENS, "learning_rate": 1e-3,
    "bf16": False, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 0,
    "disable_tqdm": True,
}


class Rollout(NamedTuple):
    prompts: list[Any]
    completions: list[list[int]]
    weights: dict[str, torch.Tensor]  # of that moment


def _outcome(trainer: Any, model: Any) -> dict[str, Any]:
    """Losses and final weights."""
    assert trainer.generation_config.use_cache is False
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()}}


def _online_dpo(model: Any, tokenizer: Any, folder: Any, rollouts: list[Rollout], **options: Any) -> dict[str, Any]:
    """Losses, final weights and completions; in `rollouts` what the reward function saw."""
    def distinct_tokens(prompts: list, completions: list, completion_ids: list, **_: Any) -> list[float]:
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        rollouts.append(Rollout(copy.deepcopy(prompts), [list(map(int, ids)) for ids in completion_ids], weights))
        return [float(len(set(map(int, ids)))) for ids in completion_ids]

    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    args = online_dpo.OnlineDPOConfig(str(folder), **(COMMON | options))
    trainer = online_dpo.OnlineDPOTrainer(model, reward_funcs=distinct_tokens, args=args, processing_class=tokenizer,
                                          train_dataset=datasets.Dataset.from_list(rows))
    trainer.train()
    return _outcome(trainer, model) | {"completions": [rollout.completions for rollout in rollouts]}


def test_online_dpo_equals_a_run_without_hf_paged(talker, trained_tokenizer, tmp_path):
    options = {"temperature": 1e-4}
    expected = _online_dpo(stock_copy(talker), trained_tokenizer, tmp_path, [], **options)
    ours = assert_program(talker, lambda: _online_dpo(talker, trained_tokenizer, tmp_path, [], **options),
                          ["native"] * STEPS, expected=expected)
    assert len(ours["completions"]) == STEPS


def test_online_dpo_draws_from_the_distribution_of_the_moment(talker, trained_tokenizer, tmp_path):
    """Each token is among stock's top 4 under the weights of its rollout; under weights before that some are not."""
    stock, rollouts = stock_copy(talker), []
    hf_paged.enable(talker, strict=True)
    _online_dpo(talker, trained_tokenizer, tmp_path, rollouts, top_k=4, learning_rate=3e-3)

    def unlikely(rollout: Rollout, weights: dict[str, torch.Tensor]) -> int:
        stock.load_state_dict(weights)
        count = 0
        for prompt, answer in zip(rollout.prompts, rollout.completions, strict=True):
            ids = trained_tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            with torch.no_grad():
                logits = stock(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
            count += int((logits[range(len(answer)), answer] < logits.topk(4).values[:, -1] - 1e-4).sum())
        return count

    assert [unlikely(rollout, rollout.weights) for rollout in rollouts] == [0] * STEPS
    assert unlikely(rollouts[-1], rollouts[0].weights) > 0
    assert rollouts[0].completions[0] != rollouts[0].completions[2]  # two of one prompt


def test_online_dpo_with_its_default_bf16_over_fp32_weights(talker, trained_tokenizer, tmp_path):
    """Greedy, since logits in bf16 tie now and then, which depends on the CPU, and a draw takes any of those."""
    options = {"bf16": None, "max_new_tokens": 8, "generation_kwargs": {"do_sample": False}}
    torch.manual_seed(0)
    expected = _online_dpo(stock_copy(talker), trained_tokenizer, tmp_path, [], **options)
    hf_paged.enable(talker, strict=True)
    torch.manual_seed(0)
    with watched_calls() as calls:
        assert _online_dpo(talker, trained_tokenizer, tmp_path, [], **options) == expected
    assert calls.paths == ["native"] * STEPS


def _gkd(model: Any, teacher: Any, tokenizer: Any, folder: Any, **options: Any) -> dict[str, Any]:
    """Losses and final weights of distillation on what the student says itself."""
    rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "4711"}]}
            for question in QUESTIONS]
    args = gkd.GKDConfig(str(folder), **(COMMON | {"lmbda": 1.0} | options))
    trainer = gkd.GKDTrainer(model, teacher, args=args, processing_class=tokenizer,
                             train_dataset=datasets.Dataset.from_list(rows))
    trainer.train()
    return _outcome(trainer, model)


def test_gkd_equals_a_run_without_hf_paged(talker, talker_path, trained_tokenizer, tmp_path):
    teacher = AutoModelForCausalLM.from_pretrained(talker_path)
    with torch.no_grad():
        teacher.model.norm.weight.neg_()
    start = {name: tensor.tolist() for name, tensor in talker.state_dict().items()}
    options = {"temperature": 1e-4}
    expected = _gkd(stock_copy(talker), teacher, trained_tokenizer, tmp_path, **options)
    ours = assert_program(talker, lambda: _gkd(talker, teacher, trained_tokenizer, tmp_path, **options),
                          ["native"] * STEPS, expected=expected)
    assert ours["weights"] != start


def test_gkd_of_what_an_enabled_teacher_says(talker, talker_path, trained_tokenizer, tmp_path):
    """`seq_kd`: the teacher makes the answers, and the student learns them."""
    student = AutoModelForCausalLM.from_pretrained(talker_path)
    options = {"temperature": 1e-4, "lmbda": 0.0, "seq_kd": True}
    expected = _gkd(stock_copy(student), stock_copy(talker), trained_tokenizer, tmp_path, **options)
    assert_program(talker, lambda: _gkd(student, talker, trained_tokenizer, tmp_path, **options),
                   ["native"] * STEPS, expected=expected)
