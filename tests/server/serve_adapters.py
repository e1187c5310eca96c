"""The trained model under two adapters, for servers that load these, and what stock's `generate` answers with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import lookup_chat, lookup_facts
from transformers import AutoModelForCausalLM

pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter

FACTS = lookup_facts(12)
QUESTION = lookup_chat(FACTS, next(iter(FACTS)))
NAMES = ("red", "blue")


def saved_adapters(path: str, folder: Path) -> tuple[Any, dict[str, str]]:
    """The model under the adapters, and where each of these is saved."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for seed, name in enumerate(NAMES):
        model = with_adapter(model, name, seed)
    model.save_pretrained(folder)
    return model, {name: str(folder / name) for name in NAMES}


def expected_answers(model: Any, tokenizer: Any, **options: Any) -> dict[str, str]:
    """What stock's `generate` answers to `QUESTION` under each adapter, and under none (`__base__`); all differ."""
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def answer(name: str) -> str:
        made = model.generate(**inputs, max_new_tokens=12, adapter_names=[name], **options)
        return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    found = {name: answer(name) for name in (*NAMES, "__base__")}
    assert len(set(found.values())) == len(found)
    return found
