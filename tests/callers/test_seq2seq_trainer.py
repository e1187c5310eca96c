"""transformers' `Seq2SeqTrainer(predict_with_generate=True)`: `labels=` goes along to generate, which ignores them."""

from __future__ import annotations

from typing import Any

import pytest
from programs import assert_program
from support import random_prompts, stock_copy
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

pytestmark = pytest.mark.usefixtures("no_accelerator_left")


def _trainer(model: Any, tokenizer: Any, folder: Any, **options: Any) -> Seq2SeqTrainer:
    prompts = random_prompts([14, 9, 14, 20], vocab_size=800)
    rows = [{"input_ids": ids, "labels": ids} for ids in prompts]
    args = Seq2SeqTrainingArguments(
        str(folder), predict_with_generate=True, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        max_steps=2, learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )
    return Seq2SeqTrainer(model, args, DataCollatorForSeq2Seq(tokenizer, padding=True), train_dataset=rows,
                          eval_dataset=rows, processing_class=tokenizer)


def _evaluated(model: Any, tokenizer: Any, folder: Any, **options: Any) -> Any:
    """Predicted ids and metrics before and after some training."""
    trainer = _trainer(model, tokenizer, folder, **options)
    seen = []
    for _ in range(2):
        prediction = trainer.predict(trainer.eval_dataset, max_new_tokens=96)
        seen.append((prediction.predictions.tolist(), prediction.metrics["test_loss"]))
        trainer.train()
    return seen


@pytest.mark.parametrize(("options", "path"), [({}, "native"), ({"generation_num_beams": 2}, "lockstep")],
                         ids=["greedy", "beams"])
def test_predictions_between_training(options, path, talker, trained_tokenizer, tmp_path):
    expected = _evaluated(stock_copy(talker), trained_tokenizer, tmp_path, **options)
    ours = assert_program(talker, lambda: _evaluated(talker, trained_tokenizer, tmp_path, **options), [path] * 4,
                          expected=expected)
    assert ours[0] != ours[1]
