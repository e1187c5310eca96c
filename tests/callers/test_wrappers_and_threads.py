"""torch.compile and DDP around an enabled model in a program's ways, and generate in threads with iterator streamers.

`tests/integration/test_enable.py` has a compiled module and DDP around one call, `tests/engine/test_interrupts.py` one
thread with a TextIteratorStreamer.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch
from support import (
    assert_falls_back,
    assert_idle,
    assert_native_parity,
    batch,
    lookup_chat,
    lookup_facts,
    stock_copy,
    tiny_model,
)
from torch import nn
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

import hf_paged

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


# -- torch.compile, DDP ------------------------------------------


def _counting_backend(calls: list[int]) -> Any:
    def backend(graph: Any, example_inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    return backend


def test_a_compiled_forward():
    """`model.forward = torch.compile(model.forward)`, as transformers' pages show it: compiled where not paged."""
    first, later, calls = tiny_model(), tiny_model(), []
    expected = first.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(first, strict=True)
    for model in (first, later):
        model.forward = torch.compile(model.forward, backend=_counting_backend(calls))
    hf_paged.enable(later, strict=True)
    for model in (first, later):
        assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    assert not calls
    ids = INPUTS["input_ids"]
    assert torch.allclose(first(input_ids=ids).logits, tiny_model()(input_ids=ids).logits, atol=1e-4)
    assert calls


def test_a_copy_whose_compiled_forward_is_the_originals_goes_to_stock():
    """The copy's `forward` still computes with the original's weights, in stock as here."""
    model = tiny_model()
    expected = model.generate(**INPUTS, **OPTIONS)
    model.forward = torch.compile(model.forward, backend="eager")
    copied = stock_copy(model)
    with torch.no_grad():
        copied.model.norm.weight.neg_()
    with torch.compiler.set_stance("force_eager"):
        actual = assert_falls_back(copied, "wrapper that hf_paged does not know", **INPUTS, **OPTIONS)
    assert torch.equal(actual, expected)


def test_a_compiled_foreign_forward_goes_to_stock():
    model = tiny_model()
    forward = model.forward

    def negated(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = -output.logits
        return output

    plain = model.generate(**INPUTS, **OPTIONS)
    model.forward = torch.compile(negated, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        expected = assert_falls_back(model, "wrapper that hf_paged does not know", **INPUTS, **OPTIONS)
    assert not torch.equal(expected, plain)


def test_rollouts_between_the_steps_of_a_compiled_model_in_ddp(process_group):
    """Training through both wrappers, generate through the module inside: tokens and weights of a bare stock model."""

    def run(model: Any, wrap: bool) -> tuple[list[torch.Tensor], Any]:
        trained = nn.parallel.DistributedDataParallel(model) if wrap else model
        trained = torch.compile(trained, backend="eager") if wrap else trained
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids, made = INPUTS["input_ids"], []
        for _ in range(3):
            made.append(model.generate(**INPUTS, **OPTIONS))
            trained(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return made, trained

    expected, _ = run(tiny_model(num_hidden_layers=1), wrap=False)
    model = hf_paged.enable(tiny_model(num_hidden_layers=1), strict=True)
    actual, wrapped = run(model, wrap=True)
    assert [a.tolist() for a in actual] == [e.tolist() for e in expected]
    assert not torch.equal(actual[0], actual[-1])
    assert hf_paged.get_engine(wrapped).stats().num_generated_tokens == 3 * 3 * 8


# -- streams from threads ------------------------------------------


FACTS = lookup_facts(7)
OPEN = {"max_new_tokens": 16}


def _questions(tokenizer: Any) -> dict[str, Any]:
    return {
        key: tokenizer.apply_chat_template(lookup_chat(FACTS, key), add_generation_prompt=True, return_tensors="pt")
        for key in FACTS
    }


def test_a_stream_per_thread_over_one_model(trained_model, trained_tokenizer):
    """As a chat server does it: a request, a thread and a streamer each; all at once they share the engine's steps."""
    questions = _questions(trained_tokenizer)
    hf_paged.enable(trained_model, strict=True)
    streamers, threads = {}, []
    for key, inputs in questions.items():
        streamers[key] = TextIteratorStreamer(trained_tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        arguments = {**inputs, **OPEN, "streamer": streamers[key]}
        threads.append(threading.Thread(target=trained_model.generate, kwargs=arguments))
    for thread in threads:
        thread.start()
    assert {key: "".join(streamer) for key, streamer in streamers.items()} == {k: f"{k}: {v}" for k, v in FACTS.items()}
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert_idle(trained_model)


def test_async_streams(trained_model, trained_tokenizer):
    """AsyncTextIteratorStreamer in an event loop: stock's pieces in stock's order, several at once."""
    questions = _questions(trained_tokenizer)

    async def ask(inputs: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(trained_tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        arguments = {**inputs, **OPEN, "streamer": streamer}
        thread = threading.Thread(target=trained_model.generate, kwargs=arguments)
        thread.start()
        pieces = [piece async for piece in streamer]
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
        return pieces

    async def one_by_one() -> list[list[str]]:
        return [await ask(inputs) for inputs in questions.values()]

    async def at_once() -> list[list[str]]:
        return await asyncio.gather(*map(ask, questions.values()))

    expected = asyncio.run(one_by_one())
    assert ["".join(pieces) for pieces in expected] == [f"{key}: {code}" for key, code in FACTS.items()]
    assert all(len(pieces) > 2 for pieces in expected)
    hf_paged.enable(trained_model, strict=True)
    assert asyncio.run(one_by_one()) == expected
    assert asyncio.run(at_once()) == expected
    assert_idle(trained_model)
