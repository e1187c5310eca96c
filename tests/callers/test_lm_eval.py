"""lm-eval-harness' `hf` model around an enabled model: the responses and scores of a model that is not enabled.

`loglikelihood` calls the forward, which is stock's. `generate_until` calls `generate` with a stopping criterion of
lm-eval's own, always, since it adds the EOS as a stop string.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_paged

datasets = pytest.importorskip("datasets")
evaluator = pytest.importorskip("lm_eval.evaluator", reason="lm-eval is an extra of the test environment")
huggingface = pytest.importorskip("lm_eval.models.huggingface")
manager = pytest.importorskip("lm_eval.tasks.manager")

SUMS = [(41, 3), (52, 6), (13, 8), (77, 4), (31, 2), (62, 9), (84, 7)]


def _sums(**_: Any) -> dict[str, Any]:
    rows = [
        {"question": f"What is {a} + {b}?", "right": f"{a} + {b} = {a + b}", "wrong": f"{a} + {b} = {a + b + 1}"}
        for a, b in SUMS
    ]
    return {"test": datasets.Dataset.from_list(rows)}


COMMON = {"custom_dataset": _sums, "test_split": "test", "doc_to_text": "{{question}}"}
GENERATE_UNTIL = COMMON | {
    "task": "sums", "output_type": "generate_until", "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    # The second stop string ends the one answer that holds it early, while the other rows of its batch go on.
    "generation_kwargs": {"until": ["\n", " = 8"], "max_gen_toks": 16, "do_sample": False},
}
MULTIPLE_CHOICE = COMMON | {
    "task": "choices", "output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": "{{[right, wrong]}}",
    "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
PERPLEXITY = COMMON | {
    "task": "perplexity", "output_type": "loglikelihood_rolling", "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Any:
    """No built-in task: reading thousands of them takes longer than all the rest."""
    return manager.TaskManager(include_path=tmp_path_factory.mktemp("tasks"), include_defaults=False)


@pytest.fixture(autouse=True)
def _no_environment_report(monkeypatch):
    """It runs pip and git: most of the time of a small evaluation."""
    monkeypatch.setattr(evaluator, "add_env_info", lambda storage: None)


def _evaluate(model: Any, tokenizer: Any, task: dict[str, Any], tasks: Any, chat: bool = True) -> Any:
    """lm-eval's result, and every response by task and sample."""
    lm = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    result = evaluator.simple_evaluate(lm, tasks=[dict(task)], apply_chat_template=chat, bootstrap_iters=0,
                                       task_manager=tasks)
    samples = result["samples"][task["task"]]
    return result["results"][task["task"]], [sample["resps"] for sample in samples]


@pytest.mark.parametrize("task", [GENERATE_UNTIL, MULTIPLE_CHOICE, PERPLEXITY], ids=lambda task: task["task"])
def test_responses_and_scores_are_those_of_a_model_not_enabled(task, tasks, trained_model, trained_tokenizer):
    chat = task is not PERPLEXITY
    expected = _evaluate(trained_model, trained_tokenizer, task, tasks, chat)
    hf_paged.enable(trained_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        assert _evaluate(trained_model, trained_tokenizer, task, tasks, chat) == expected
        assert _evaluate(trained_model, trained_tokenizer, task, tasks, chat) == expected
    results, responses = expected
    assert len(responses) == len(SUMS)
    if task is GENERATE_UNTIL:
        answers = [f"{a} + {b} = {a + b}".split(" = 8")[0] for a, b in SUMS]
        assert responses == [[[answer]] for answer in answers]
        assert sum(" = " not in answer for answer in answers) == 1
    elif task is MULTIPLE_CHOICE:
        assert results["acc,none"] == 1.0


def test_generate_until_runs_on_the_engine(tasks, trained_model, trained_tokenizer):
    """Its stopping criteria are its own, so it takes lockstep."""
    expected = _evaluate(trained_model, trained_tokenizer, GENERATE_UNTIL, tasks)
    hf_paged.enable(trained_model, strict=True)
    assert _evaluate(trained_model, trained_tokenizer, GENERATE_UNTIL, tasks) == expected
    assert hf_paged.get_engine(trained_model).stats().num_generated_tokens > 0


def test_weights_changed_between_two_evaluations(tasks, trained_path, trained_tokenizer):
    """An evaluation in the middle of training scores the weights of the moment."""
    model = AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32)
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        before = _evaluate(model, trained_tokenizer, GENERATE_UNTIL, tasks)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(0.2)
        after = _evaluate(model, trained_tokenizer, GENERATE_UNTIL, tasks)
    assert after[1] != before[1]
    hf_paged.disable(model)
    assert _evaluate(model, trained_tokenizer, GENERATE_UNTIL, tasks) == after
