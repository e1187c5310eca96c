"""The server with OpenAI's client: the text is what `model.generate` makes."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_support import Server, events_of, openai, served
from support import lookup_chat, lookup_facts

import hf_paged
from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason
from hf_paged.server.app import build_app
from hf_paged.server.generation import Generation
from hf_paged.server.lifetime import OpenAnswers

FACTS = lookup_facts(12)
QUESTIONS = [lookup_chat(FACTS, name) for name in list(FACTS)[:4]]


def answer(stock, tokenizer, messages, **kwargs):
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = stock.generate(**inputs, **{"max_new_tokens": 24, "tokenizer": tokenizer, **kwargs})
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_generate(server, stock, trained_tokenizer):
    """Streaming or not, one at a time or all at once; and it was the engine that made them."""
    expected = [answer(stock, trained_tokenizer, question) for question in QUESTIONS]
    assert next(iter(FACTS.values())) in expected[0]
    before = server.engine().stats().num_generated_tokens
    completion = server.chat(QUESTIONS[0], max_tokens=24)
    assert completion.choices[0].message.content == expected[0]
    assert completion.choices[0].finish_reason == "stop"
    assert server.engine().stats().num_generated_tokens - before == completion.usage.completion_tokens > 0
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        streams = list(pool.map(lambda question: server.streamed(question, max_tokens=24), QUESTIONS))
        whole = list(pool.map(lambda question: server.chat(question, max_tokens=24), QUESTIONS))
    assert [text for text, _ in streams] == expected
    assert all(pieces > 1 for _, pieces in streams)
    assert [completion.choices[0].message.content for completion in whole] == expected
    text = server.client.completions.create(model=server.path, prompt="count from 3 to 7", max_tokens=1)
    assert (text.usage.completion_tokens, text.choices[0].finish_reason) == (1, "length")
    assert server.health() == 200


def test_requests_have_their_own_settings(server, stock, trained_tokenizer):
    """The first samples, the later do not."""
    expected = answer(stock, trained_tokenizer, QUESTIONS[0], max_new_tokens=8)
    wild = {"extra_body": {"generation_config": json.dumps(
        {"do_sample": True, "temperature": 100.0, "max_new_tokens": 8, "num_return_sequences": 3})}}
    sampled = {server.chat(QUESTIONS[0], seed=seed, **wild).choices[0].message.content for seed in (1, 2, 1)}
    assert len(sampled) == 2
    assert expected not in sampled
    assert server.chat(QUESTIONS[0], max_tokens=8).choices[0].message.content == expected
    cold = {"extra_body": {"generation_config": json.dumps(
        {"do_sample": True, "temperature": 1e-4, "max_new_tokens": 8})}}
    assert server.chat(QUESTIONS[0], **cold).choices[0].message.content == expected


def test_stop_and_penalties_are_honoured(server, stock, trained_tokenizer, monkeypatch):
    """Streaming and not, as `model.generate` with the same settings, in the batch; without the stop text itself."""
    monkeypatch.delattr(Generation, "_stock_outputs")
    plain = answer(stock, trained_tokenizer, QUESTIONS[0])
    digits = plain[1:3]
    for body, settings in (({"stop": [digits]}, {"stop_strings": [digits]}),
                           ({"extra_body": {"repetition_penalty": 5.0}}, {"repetition_penalty": 5.0})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_paged.FallbackWarning)
            expected = answer(stock, trained_tokenizer, QUESTIONS[0], **settings)
        assert expected != plain
        expected = expected.partition(digits)[0] if "stop" in body else expected
        completion = server.chat(QUESTIONS[0], max_tokens=24, **body)
        assert completion.choices[0].message.content == expected
        assert server.streamed(QUESTIONS[0], max_tokens=24, **body)[0] == expected
    others = answer(stock, trained_tokenizer, QUESTIONS[1])
    assert server.chat(QUESTIONS[1], max_tokens=24).choices[0].message.content == others


def test_client_that_leaves_ends_its_request(server):
    stream = server.chat(QUESTIONS[0], stream=True, max_tokens=2000,
                             extra_body={"generation_config": json.dumps({"eos_token_id": -1})})
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    engine = hf_paged.get_engine(server.model)
    deadline = time.monotonic() + 30
    while engine.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.stats().num_running == 0
    assert engine.stats().num_generated_tokens < 1500


class Death(BaseException):
    """What no thread survives."""


@pytest.mark.parametrize(("error", "status", "health"), [(RuntimeError, 500, 200), (Death, 503, 503)])
def test_an_engine_that_breaks_fails_its_requests_and_a_dead_thread_is_a_503(trained_path, monkeypatch, error, status,
                                                                             health):
    """After a step that raised the server goes on; without its thread it says that it is ill."""
    with served(trained_path) as server:
        before = server.chat(QUESTIONS[0], max_tokens=4).choices[0].message.content

        def broken(**kwargs):
            raise error("the roof is on fire")

        with monkeypatch.context() as patch:
            patch.setattr(server.engine()._core, "step", broken)
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    server.chat(QUESTIONS[0], max_tokens=2, stream=stream)
                assert caught.value.status_code == status
        assert server.health() == health
        if health == 200:
            assert server.chat(QUESTIONS[0], max_tokens=4).choices[0].message.content == before


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_server_is_healthy_once_its_engine_is_warm(trained_path, monkeypatch, error):
    """Also where the warm-up fails: the first requests wait longer then."""
    go_on, warmed_up = threading.Event(), []

    def warm_up(engine, requests):
        assert go_on.wait(60)
        warmed_up.append(requests)
        if error is not None:
            raise error

    monkeypatch.setattr(Engine, "needs_warm_up", True)
    monkeypatch.setattr(Engine, "warm_up", warm_up)
    with served(trained_path) as server:
        server.served.warm_up()
        assert server.get("/health") == (503, '{"status":"starting","reason":"the engine compiles kernels"}')
        go_on.set()
        deadline = time.monotonic() + 60
        while server.health() != 200:
            assert time.monotonic() < deadline
        assert warmed_up == [[[0] * 8]]


def test_a_model_that_is_not_supported_runs_in_stock(trained_path, stock, trained_tokenizer, monkeypatch):
    """One request after the other by `model.generate`, and what only the engine has is refused by name."""
    monkeypatch.setattr("hf_paged.server.served_model.unsupported_class", lambda model: Reason("it is odd", remedy=""))
    expected = [answer(stock, trained_tokenizer, question) for question in QUESTIONS[:2]]
    with pytest.warns(hf_paged.FallbackWarning, match="it is odd.*one after the other"):
        server = Server(trained_path)
    try:
        assert not hf_paged.is_enabled(server.model)
        with ThreadPoolExecutor(2) as pool:
            made = pool.map(lambda question: server.chat(question, max_tokens=24), QUESTIONS[:2])
            assert [one.choices[0].message.content for one in made] == expected
        assert server.streamed(QUESTIONS[0], max_tokens=24)[0] == expected[0]
        for fields, name in (({"logprobs": True}, "logprobs"), ({"presence_penalty": 1}, "presence_penalty"),
                             ({"response_format": {"type": "json_object"}}, "response_format")):
            with pytest.raises(openai.BadRequestError, match=f"{name}: expected it left out"):
                server.chat(QUESTIONS[0], max_tokens=4, **fields)
        assert server.health() == 200
    finally:
        server.close()


def test_names_of_the_model_and_streams_that_end_with_done(trained_path):
    """Each name of `--served-model-name` is a model, the first that of answers; the folder is none then."""
    with served(trained_path, names=["small", "tiny"]) as server:
        assert [one.id for one in server.client.models.list()] == ["small", "tiny"]
        for name in ("small", "tiny"):
            made = server.client.completions.create(model=name, prompt="count", max_tokens=1)
            assert made.model == "small"
        with pytest.raises(openai.BadRequestError, match="expected a name of this server: small, tiny"):
            server.chat(QUESTIONS[0])
        for path, prompt in (("chat/completions", {"messages": QUESTIONS[0]}), ("completions", {"prompt": "count"}),
                             ("responses", {"input": "count"})):
            status, said = server.post(f"/v1/{path}", json.dumps({**prompt, "stream": True}).encode())
            assert status == 200 and events_of(said)
            assert said.endswith("data: [DONE]\n\n")
            assert isinstance(server.post(f"/v1/{path}", json.dumps(prompt).encode())[1], dict)


def test_a_body_that_is_announced_as_too_long_is_refused_before_it_comes(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 413 and "--max-body-bytes" in json.loads(reply.read())["error"]["message"]
    connection.close()
    assert server.health() == 200


@pytest.mark.parametrize("enable_cors", [True, False])
def test_pages_of_any_origin_read_a_refusal_too(enable_cors):
    """A browser keeps an answer without the header from its page."""
    app = build_app(None, OpenAnswers(), enable_cors=enable_cors, max_body_bytes=9)
    sent, scope = [], {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [
        (b"origin", b"http://page"), (b"content-length", b"10")]}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, asyncio.Event().wait, send))
    origins = [value for name, value in sent[0]["headers"] if name == b"access-control-allow-origin"]
    assert (sent[0]["status"], origins) == (413, [b"*"] * enable_cors)


def test_every_endpoint_is_in_the_schema(server):
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    assert {*paths} == {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/metrics"}
    assert server.get("/no/such/path")[0] == 404
