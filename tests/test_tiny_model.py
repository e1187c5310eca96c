"""The tiny trained model in the repository, in stock transformers on the CPU: it loads, and it knows its tasks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from module_files import load_module
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = ROOT / "examples" / "models" / "tiny-qwen3"


tool = load_module(ROOT / "tools" / "train_tiny_qwen3.py")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """The model in fp32 and in bf16."""
    return [AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=d) for d in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module")
def lookups() -> list[Any]:
    """12 held-out look-ups, prompts of about 500 to 1,500 tokens, one to three turns."""
    rng = random.Random(7)
    return [tool.make_lookup_example(rng, 48 + 9 * i, 1 + i % 3) for i in range(12)]


def wanted_ids(tokenizer: Any, examples: list[Any]) -> list[list[int]]:
    """The right answers' ids, the closing `<|im_end|>` included."""
    return [[*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id] for _, answer in examples]


def test_loads(models: list[Any], tokenizer: Any) -> None:
    config = models[0].config
    assert all(type(model) is Qwen3ForCausalLM for model in models)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 4096
    assert config.vocab_size >= len(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    for model in models:
        generation = model.generation_config
        assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert not generation.do_sample
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) < 5_000_000


def test_stored_weights_are_exact_in_bf16(models: list[Any]) -> None:
    for (name, full), half in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full, half.float()), name


def test_chat_template(tokenizer: Any) -> None:
    messages, answer = tool.make_lookup_example(random.Random(0), 3, 2)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("Größe 3 µm: naïve?\n")["input_ids"]) == "Größe 3 µm: naïve?\n"
    assert re.fullmatch(r"[a-z]+-[a-z]+: \d{4}", answer)

    row = [*messages, {"role": "assistant", "content": answer}]
    ids, is_answer = tool.Encoder(tokenizer).row(row)
    assert ids == tokenizer.apply_chat_template(row, return_dict=False)
    answers = "".join(m["content"] + "<|im_end|>" for m in row if m["role"] == "assistant")
    assert tokenizer.decode([i for i, wanted in zip(ids, is_answer, strict=True) if wanted]) == answers


def test_examples_are_held_out() -> None:
    train, test = set(tool.KEYS[False]), set(tool.KEYS[True])
    assert (len(train), len(test), train & test) == (3584, 512, set())
    first, second = (tool.make_lookup_example(random.Random(3), 50, 2) for _ in range(2))
    assert first == second
    assert set(re.findall(r"([a-z]+-[a-z]+):", first[0][0]["content"])) <= test
    assert first[1] in first[0][0]["content"].splitlines()


@pytest.mark.slow
def test_answers_held_out_lookups(models: list[Any], tokenizer: Any, lookups: list[Any]) -> None:
    lengths = [len(tokenizer.apply_chat_template(messages, return_dict=False)) for messages, _ in lookups]
    assert min(lengths) > 400
    assert 1_300 < max(lengths) < 1_600
    wanted = wanted_ids(tokenizer, lookups)
    for model in models:
        assert tool.greedy_answers(model, tokenizer, lookups, batch_size=6) == wanted, model.dtype


@pytest.mark.parametrize("task", ["copy", "count", "sum"])
def test_answers_the_other_tasks(task: str, models: list[Any], tokenizer: Any) -> None:
    rng = random.Random(11)
    examples = [tool.make_task_example(rng, task) for _ in range(8)]
    wanted = wanted_ids(tokenizer, examples)
    for model in models:
        assert tool.greedy_answers(model, tokenizer, examples) == wanted, model.dtype


def test_margins_are_wide(models: list[Any], tokenizer: Any, lookups: list[Any]) -> None:
    figures = tool.logit_figures(models, tokenizer, lookups[:4])
    assert figures["smallest_margin"] >= tool.MIN_MARGIN_RATIO * figures["largest_bf16_difference"]


def test_the_answer_depends_on_the_table(models: list[Any], tokenizer: Any) -> None:
    """Another code in the table is another answer: nothing is memorised."""
    messages, answer = tool.make_lookup_example(random.Random(5), 60)
    other = answer[:-4] + f"{(int(answer[-4:]) + 1234) % 10_000:04d}"
    messages[0]["content"] = messages[0]["content"].replace(answer, other)
    examples = [(messages, other)]
    assert tool.greedy_answers(models[0], tokenizer, examples) == wanted_ids(tokenizer, examples)


def test_recorded_figures_meet_the_targets() -> None:
    for report in json.loads((MODEL_DIR / "eval.json").read_text()).values():
        assert report["passed"]
        assert report["tasks"]["lookup"]["examples"] >= 500
