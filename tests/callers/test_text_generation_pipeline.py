"""transformers' text-generation pipeline on an enabled model: texts and chats, padded batches, streams of inputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import lookup_chat, lookup_facts
from transformers import AutoTokenizer, pipeline

import hf_paged

FACTS = lookup_facts(9)
CHATS = [lookup_chat(FACTS, key) for key in list(FACTS)[:5]] + [
    [{"role": "user", "content": "What is 47 + 8?"}],
    [{"role": "user", "content": "Repeat: owl red swan"}],
]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def _texts(tokenizer: Any) -> list[str]:
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in CHATS]


def _both(model: Any, tokenizer: Any, call: Any) -> tuple[Any, Any]:
    """`call(pipeline)` of the stock model, and of the enabled one, which must be native."""
    expected = call(pipeline("text-generation", model=model, tokenizer=tokenizer))
    hf_paged.enable(model, strict=True)
    return expected, call(pipeline("text-generation", model=model, tokenizer=tokenizer))


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_batches_with_padding(kind, batch_size, trained_model, trained_tokenizer):
    inputs = CHATS if kind == "chats" else _texts(trained_tokenizer)
    expected, actual = _both(
        trained_model, trained_tokenizer, lambda pipe: pipe(inputs, batch_size=batch_size, **GREEDY)
    )
    assert actual == expected
    assert hf_paged.get_engine(trained_model).stats().num_generated_tokens > 0
    if kind == "chats":
        answers = [output[0]["generated_text"][-1] for output in actual]
        assert [answer["role"] for answer in answers] == ["assistant"] * len(CHATS)
        contents = [answer["content"] for answer in answers]
        assert contents == [f"{key}: {FACTS[key]}" for key in list(FACTS)[:5]] + ["47 + 8 = 55", "owl red swan"]


def test_batches_share_the_prefix_of_their_chats(trained_model, trained_tokenizer):
    """Five questions about one table in batches of two: the later batches find the table in the cache."""
    hf_paged.enable(trained_model, strict=True)
    pipe = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    pipe(CHATS[:4], batch_size=2, **GREEDY)
    stats = hf_paged.get_engine(trained_model).stats()
    table = trained_tokenizer.apply_chat_template(CHATS[0][:1], return_dict=False)
    assert stats.prefix_cache_hits >= 3 * (len(table) // 16) * 16


@pytest.mark.parametrize("options", [
    {"return_full_text": False}, {"return_tensors": True}, {"max_new_tokens": 3}, {"min_new_tokens": 20},
    {"prefix": "Codes:\n"}, {"eos_token_id": 13},
], ids=lambda options: next(iter(options)))
def test_options(options, trained_model, trained_tokenizer):
    texts = _texts(trained_tokenizer)
    merged = {**GREEDY, "max_new_tokens": 24} | options
    expected, actual = _both(trained_model, trained_tokenizer, lambda pipe: pipe(texts, batch_size=4, **merged))
    assert actual == expected


def test_a_stop_sequence(trained_model, trained_tokenizer):
    """It becomes `stop_strings`, which are native."""
    pipe = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    expected = pipe(CHATS, batch_size=4, stop_sequence=" red", **GREEDY)
    assert expected[-1][0]["generated_text"][-1]["content"] == "owl red"
    hf_paged.enable(trained_model, strict=True)
    assert pipe(CHATS, batch_size=4, stop_sequence=" red", **GREEDY) == expected
    assert hf_paged.get_engine(trained_model).stats().num_generated_tokens > 0


def test_inputs_from_a_generator(trained_model, trained_tokenizer):
    expected, actual = _both(trained_model, trained_tokenizer,
                             lambda pipe: list(pipe((chat for chat in CHATS), batch_size=2, **GREEDY)))
    assert len(actual) == len(CHATS)
    assert actual == expected


def test_sampling_is_repeatable_and_gives_as_many_texts_as_asked_for(trained_model, trained_tokenizer):
    hf_paged.enable(trained_model, strict=True)
    pipe = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(pipe("amber", max_new_tokens=8, do_sample=True, temperature=4.0, num_return_sequences=3))
    assert outputs[0] == outputs[1]
    assert len({output["generated_text"] for output in outputs[0]}) == 3


def test_defaults_of_the_pipeline_are_native(trained_model, trained_tokenizer):
    """Without any option it samples up to 256 tokens; the trained model ends its answer itself."""
    expected, actual = _both(trained_model, trained_tokenizer, lambda pipe: pipe(CHATS[-2]))
    assert actual == expected
    assert actual[0]["generated_text"][-1]["content"] == "47 + 8 = 55"


def test_padding_on_the_right_goes_to_stock(trained_model, trained_path):
    tokenizer = AutoTokenizer.from_pretrained(trained_path, padding_side="right")
    texts = _texts(tokenizer)
    pipe = pipeline("text-generation", model=trained_model, tokenizer=tokenizer)
    pipe.tokenizer.padding_side = "right"
    expected = pipe(texts, batch_size=7, **GREEDY)
    hf_paged.enable(trained_model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pipe(texts, batch_size=7, **GREEDY) == expected
    reasons = [str(w.message) for w in caught if issubclass(w.category, hf_paged.FallbackWarning)]
    assert len(reasons) == 1 and "right padding" in reasons[0]
