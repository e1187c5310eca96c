"""What the engine did between two logs stands in the logs of a trainer, and in a run of Weights & Biases."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from support import random_prompts, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_paged
from hf_paged import PagedStatsCallback
from hf_paged.observe.progress import activity


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        ids = torch.tensor(random_prompts([8], seed=index)[0])
        return {"input_ids": ids, "labels": ids}


class Generates(TrainerCallback):
    """Stands for rollouts: a call of generate at the end of each step."""

    def __init__(self, first=0):
        self.first = first

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step > self.first:
            ids = torch.tensor(random_prompts([32], seed=9))
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)


class Sees(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trained(tmp_path, model, *callbacks):
    args = TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
                             report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, args, train_dataset=Rows(), callbacks=list(callbacks))
    trainer.train()
    return trainer


def test_logs_hold_what_happened_since_the_last(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=object(), log=sent.append))
    model, sees = hf_paged.enable(tiny_model()), Sees()
    trainer = trained(tmp_path, model, Generates(), PagedStatsCallback(), sees)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 3
    for entry, log, line in zip(history, sees.logs, sent, strict=False):
        found = {name: value for name, value in entry.items() if name.startswith("hf_paged/")}
        assert found.items() <= log.items()
        assert line == {**found, "train/global_step": entry["step"]}
        assert (found["hf_paged/calls_native"], found["hf_paged/calls_stock"]) == (1, 0)
        assert found["hf_paged/generated_per_second"] > 0 and found["hf_paged/prefill_per_second"] > 0
        assert found["hf_paged/hit_rate"] == 0  # the weights changed
        assert all(isinstance(value, float) for value in found.values())


def test_logs_of_a_model_that_is_not_enabled_are_as_they_were(tmp_path):
    trainer = trained(tmp_path, tiny_model(), PagedStatsCallback())
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("hf_paged/")]


def test_a_model_that_is_enabled_meanwhile_is_compared_from_then_on(tmp_path):
    class Enables(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            hf_paged.enable(model)

    trainer = trained(tmp_path, tiny_model(), Enables(), Generates(first=0), PagedStatsCallback())
    counts = [entry.get("hf_paged/calls_native") for entry in trainer.state.log_history if "loss" in entry]
    assert counts == [None, 1.0, 1.0]


@pytest.mark.slow
def test_weights_and_biases_takes_them(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    with wandb.init(project="p", dir=str(tmp_path)) as run:
        trained(tmp_path, hf_paged.enable(tiny_model()), Generates(), PagedStatsCallback())
        assert run.summary["hf_paged/calls_native"] == 0.0 or run.summary["hf_paged/calls_native"] == 1.0
        assert run.summary["train/global_step"] == 3


def test_activity_between_two_looks():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    ids = torch.tensor(random_prompts([48]))
    ask = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(**ask)
    before = engine.stats()
    model.generate(**ask)
    found = activity(before, engine.stats(), 2.0)
    assert found["generated_per_second"] == 2.0
    assert found["prefill_per_second"] == 0.5  # all but the last token is cached
    assert found["hit_rate"] == pytest.approx(47 / 48) and found["kv_used"] == 0 and found["num_preemptions"] == 0
    assert activity(before, before, 1.0) == dict.fromkeys(found, 0)
