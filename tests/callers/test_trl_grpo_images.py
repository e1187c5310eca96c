"""TRL's GRPOTrainer with images: rollouts run natively, and training is bitwise that of a run without hf_paged."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_processors import model_of, pil, processor
from recurrent_models import with_idiom
from transformers import PreTrainedModel

import hf_paged

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", reason="an extra of the test environment")

pytestmark = [pytest.mark.usefixtures("no_accelerator_left"), pytest.mark.slow]
STEPS, GROUP, NEW_TOKENS = 3, 3, 8


class Run(NamedTuple):
    completions: list[list[list[int]]]
    model: Any
    log: list[dict[str, Any]]
    fallbacks: list[str]


def train(model: PreTrainedModel, name: str, folder: Any, *, bf16: bool) -> Run:
    completions: list[list[list[int]]] = []

    def distinct_tokens(completion_ids: list, **_: Any) -> list[float]:
        completions.append([list(ids) for ids in completion_ids])
        return [float(len(set(ids))) for ids in completion_ids]

    random = np.random.RandomState(0)
    rows = [{"prompt": [{"role": "user", "content": f"What is picture {n}?"}],
             "image": pil.fromarray(random.randint(0, 255, (16, 16 + 8 * (n % 2), 3), dtype=np.uint8))}
            for n in range(4)]
    args = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_steps=STEPS,
        max_completion_length=NEW_TOKENS, learning_rate=3e-3, bf16=bf16, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, seed=0, disable_tqdm=True, entropy_coef=1.0,
        generation_kwargs={"do_sample": False})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trl.GRPOTrainer(model=model, reward_funcs=distinct_tokens, args=args,
                                  processing_class=processor(name), train_dataset=datasets.Dataset.from_list(rows))
        trainer.train()
    fallbacks = [str(one.message) for one in caught if issubclass(one.category, hf_paged.FallbackWarning)]
    return Run(completions, trainer.accelerator.unwrap_model(trainer.model), trainer.state.log_history, fallbacks)


@pytest.mark.parametrize(("name", "bf16"), [
    ("qwen2.5-vl", False), ("qwen2.5-vl", True), pytest.param("qwen3.5", False, marks=with_idiom)])
def test_training_with_images_is_stocks(name, tmp_path, bf16):
    """Also under autocast, which accelerate puts around the model's forward; there states round otherwise, in steps of
    other shapes than stock's."""
    model = model_of(processor(name), name)
    stock = train(copy.deepcopy(model), name, tmp_path / "stock", bf16=bf16)
    hf_paged.enable(model)
    ours = train(model, name, tmp_path / "ours", bf16=bf16)
    assert not ours.fallbacks and len(ours.completions) == STEPS
    assert ours.completions == stock.completions
    assert len({tuple(ids) for step in ours.completions for ids in step}) > 2
    for key in ("loss", "grad_norm", "reward"):
        assert [one.get(key) for one in ours.log] == [one.get(key) for one in stock.log]
    for (key, weight), (_, other) in zip(model.named_parameters(), stock.model.named_parameters(), strict=True):
        assert torch.equal(weight, other), key
    calls = hf_paged.get_engine(model).stats().calls
    assert calls["native"].num_calls == STEPS and not calls["stock"].num_calls
