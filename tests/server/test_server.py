"""`transformers serve` over the paged engine, with the OpenAI client: the text is what `model.generate` makes."""

from __future__ import annotations

import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_support import openai, served, uninstall_serving
from support import lookup_chat, lookup_facts
from threads import threads_of_engines
from transformers import AutoModelForCausalLM, GenerationMixin, Qwen3ForCausalLM

import hf_paged
from hf_paged.integration import install as install_module
from hf_paged.server.requests import ServedRequests

FACTS = lookup_facts(12)
QUESTIONS = [lookup_chat(FACTS, name) for name in list(FACTS)[:4]]


@pytest.fixture(params=[False, True], ids=["generate", "continuous"])
def server(request, trained_path):
    with served(trained_path, request.param) as server:
        yield server


@pytest.fixture
def continuous(trained_path):
    with served(trained_path, True) as server:
        yield server


@pytest.fixture
def stock(trained_path):
    """A stock model that answers as `model.generate` does."""
    return AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32).eval()


def answer(stock, tokenizer, messages, **kwargs):
    hf_paged.disable(stock)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert type(stock) is Qwen3ForCausalLM
    install_module._enabled.add(stock)  # it stays stock while hf_paged is installed
    output = stock.generate(**inputs, **{"max_new_tokens": 24, "tokenizer": tokenizer, **kwargs})
    assert type(stock) is Qwen3ForCausalLM
    install_module._enabled.discard(stock)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_generate(server, stock, trained_tokenizer):
    """Streaming or not, one at a time or all at once; and it was the engine that made them."""
    expected = [answer(stock, trained_tokenizer, question) for question in QUESTIONS]
    assert next(iter(FACTS.values())) in expected[0]
    completion = server.chat(QUESTIONS[0], max_tokens=24)
    assert completion.choices[0].message.content == expected[0]
    assert completion.choices[0].finish_reason == "stop"
    engine = hf_paged.get_engine(server.model)
    assert engine.stats().num_generated_tokens == completion.usage.completion_tokens > 0
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        streams = list(pool.map(lambda question: server.streamed(question, max_tokens=24), QUESTIONS))
        whole = list(pool.map(lambda question: server.chat(question, max_tokens=24), QUESTIONS))
    assert [text for text, _ in streams] == expected
    assert all(pieces > 1 for _, pieces in streams)
    assert [completion.choices[0].message.content for completion in whole] == expected
    text = server.client.completions.create(model=server.path, prompt="count from 3 to 7", max_tokens=1)
    assert (text.usage.completion_tokens, text.choices[0].finish_reason) == (1, "length")
    assert server.health() == 200


def test_requests_have_their_own_settings(continuous, stock, trained_tokenizer):
    """What transformers would take from the first request for all: here the first samples, the later do not."""
    expected = answer(stock, trained_tokenizer, QUESTIONS[0], max_new_tokens=8)
    wild = {"extra_body": {"generation_config": json.dumps(
        {"do_sample": True, "temperature": 100.0, "max_new_tokens": 8, "num_return_sequences": 3})}}
    sampled = {continuous.chat(QUESTIONS[0], seed=seed, **wild).choices[0].message.content for seed in (1, 2, 1)}
    assert len(sampled) == 2
    assert expected not in sampled
    assert continuous.chat(QUESTIONS[0], max_tokens=8).choices[0].message.content == expected
    cold = {"extra_body": {"generation_config": json.dumps(
        {"do_sample": True, "temperature": 1e-4, "max_new_tokens": 8})}}
    assert continuous.chat(QUESTIONS[0], **cold).choices[0].message.content == expected
    assert continuous.cb.get_result(timeout=0.01) is None  # nothing lies about that nobody fetches


def test_stop_and_penalties_are_honoured(continuous, stock, trained_tokenizer, monkeypatch):
    """Streaming and not, as `model.generate` with the same settings, in the batch; without the stop text itself."""
    monkeypatch.delattr(ServedRequests, "_run_alone")
    plain = answer(stock, trained_tokenizer, QUESTIONS[0])
    digits = plain[1:3]
    for body, settings in (({"stop": [digits]}, {"stop_strings": [digits]}),
                           ({"extra_body": {"repetition_penalty": 5.0}}, {"repetition_penalty": 5.0})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_paged.FallbackWarning)
            expected = answer(stock, trained_tokenizer, QUESTIONS[0], **settings)
        assert expected != plain
        expected = expected.partition(digits)[0] if "stop" in body else expected
        completion = continuous.chat(QUESTIONS[0], max_tokens=24, **body)
        assert completion.choices[0].message.content == expected
        assert continuous.streamed(QUESTIONS[0], max_tokens=24, **body)[0] == expected
    others = answer(stock, trained_tokenizer, QUESTIONS[1])
    assert continuous.chat(QUESTIONS[1], max_tokens=24).choices[0].message.content == others


def test_client_that_leaves_ends_its_request(continuous):
    hf_paged.enable(continuous.model)
    stream = continuous.chat(QUESTIONS[0], stream=True, max_tokens=2000,
                             extra_body={"generation_config": json.dumps({"eos_token_id": -1})})
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    engine = hf_paged.get_engine(continuous.model)
    deadline = time.monotonic() + 30
    while engine.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.stats().num_running == 0
    assert engine.stats().num_generated_tokens < 1500


class Death(BaseException):
    """What no thread survives."""


@pytest.mark.parametrize(("error", "status", "health"), [(RuntimeError, 500, 200), (Death, 503, 503)])
def test_an_engine_that_breaks_fails_its_requests_and_a_dead_thread_is_a_503(continuous, monkeypatch, error, status,
                                                                             health):
    """After a step that raised the server goes on; without its thread it says that it is ill."""
    before = continuous.chat(QUESTIONS[0], max_tokens=4).choices[0].message.content

    def broken(**kwargs):
        raise error("the roof is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(hf_paged.get_engine(continuous.model)._core, "step", broken)
        for number in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                continuous.chat(QUESTIONS[0], max_tokens=2)
            assert caught.value.status_code == status or number == 0
            time.sleep(0.2)  # the server closes the connection after an error of its own
    assert continuous.health() == health
    if health == 200:
        assert continuous.chat(QUESTIONS[0], max_tokens=4).choices[0].message.content == before


def test_module_runs_transformers_command_line(monkeypatch, trained_path):
    """`python -m hf_paged.serve MODEL --continuous-batching`: everything is installed when the server starts."""
    import uvicorn

    from hf_paged import serve

    ran = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: ran.append((self.config.port, hf_paged.is_installed())))
    with pytest.raises(SystemExit) as done:
        serve.main([trained_path, "--continuous-batching", "--device", "cpu", "--port", "8123"])
    uninstall_serving()
    hf_paged.uninstall()
    assert done.value.code in (0, None)
    assert ran == [(8123, True)]
    assert not hf_paged.is_installed()
    assert threads_of_engines() == []
    assert "generate_batch" not in vars(GenerationMixin)
