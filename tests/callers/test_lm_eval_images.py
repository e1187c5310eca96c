"""lm-eval-harness' `hf-multimodal` model around an enabled image-text model: the responses of one that is not enabled.

`generate_until` calls `generate` with a stopping criterion of lm-eval's own, so it takes lockstep.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_processors import image, model_of, processor
from support import num_calls
from transformers import AutoProcessor

import hf_paged

datasets = pytest.importorskip("datasets")
evaluator = pytest.importorskip("lm_eval.evaluator", reason="lm-eval is an extra of the test environment")
hf_vlms = pytest.importorskip("lm_eval.models.hf_vlms")
manager = pytest.importorskip("lm_eval.tasks.manager")

NEW = 12
QUESTIONS = ["What is it?", "What is it?", "Which of both is the older one?", "And now?", "What is it?"]


def _documents(**_: Any) -> dict[str, Any]:
    rows = [{"question": question, "images": [image(3 * row, 16, 16), image(3 * row + 1, 16, 24)]}
            for row, question in enumerate(QUESTIONS)]
    for row in rows:
        if "both" not in row["question"]:
            row["images"].pop()
    return {"test": datasets.Dataset.from_list(rows)}


TASK = {
    "task": "pictures", "output_type": "generate_until", "custom_dataset": _documents, "test_split": "test",
    "doc_to_text": "{% for _ in images %}<image>{% endfor %}{{question}}", "doc_to_target": "a picture",
    "doc_to_image": lambda doc: doc["images"],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(autouse=True)
def _no_environment_report(monkeypatch):
    """It runs pip and git: most of the time of a small evaluation."""
    monkeypatch.setattr(evaluator, "add_env_info", lambda storage: None)


def _evaluate(model: Any, folder: Any, stops: list[str]) -> tuple[dict[str, Any], list[str]]:
    """lm-eval's result, and the response of each document."""
    lm = hf_vlms.HFMultimodalLM(pretrained=model, batch_size=4)
    task = TASK | {"generation_kwargs": {"until": stops, "max_gen_toks": NEW, "do_sample": False}}
    result = evaluator.simple_evaluate(
        lm, tasks=[task], apply_chat_template=True, bootstrap_iters=0,
        task_manager=manager.TaskManager(include_path=folder, include_defaults=False))
    return result["results"]["pictures"], [sample["resps"][0][0] for sample in result["samples"]["pictures"]]


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "gemma3", "idefics3"])
def test_responses_are_those_of_a_model_not_enabled(name, tmp_path, monkeypatch):
    made = processor(name)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **kwargs: made)  # lm-eval's only way to it
    model = model_of(made, name)
    _, responses = _evaluate(model, tmp_path, [])
    assert len(responses) == len(QUESTIONS) and responses[0] != responses[1], "of one question about two pictures"
    # Where each response has a character of its own in the middle. Rows of a batch go on until all have met one stop.
    stops = [next(character for character in response[2:] if character.isascii()) for response in responses]
    expected = _evaluate(model, tmp_path, stops)
    hf_paged.enable(model, strict=True)
    assert _evaluate(model, tmp_path, stops) == expected
    assert _evaluate(model, tmp_path, stops) == expected
    assert num_calls(model) == {"lockstep": 4}
    stats = hf_paged.get_engine(model).stats()
    assert stats.num_generated_tokens < 2 * len(QUESTIONS) * NEW, "the last batch, of one row, did not end early"
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(1, 0))
    after = _evaluate(model, tmp_path, stops)
    assert after != expected
    hf_paged.disable(model)
    assert _evaluate(model, tmp_path, stops) == after
