"""Clients of the server that leave, that send what there is no room for, and that must not learn of each other."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_bodies import CHAT, ENDPOINTS, PROMPTS, RESPONSES, TEXT
from serve_support import served
from support import tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import hf_paged
from hf_paged.integration.call_context import salt_of_call
from hf_paged.integration.continuous_batching import batched_calls
from hf_paged.integration.stock_pieces import EndOfCall
from hf_paged.options.arguments import salt_digest
from hf_paged.server import requests
from hf_paged.server.calls import GeneratesFor, RefusedRequestError, ServedCall

pytestmark = pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")

POSITIONS = 128  # that the engine of `small` has; the model has more
NEW = 40
ENDLESS = {"max_new_tokens": 3900, "eos_token_id": -1}
ALONE = {"max_new_tokens": 1, "encoder_repetition_penalty": 1.1}  # no request of a batch
WAYS = {"native": {}, "lockstep": {"encoder_repetition_penalty": 1.1}, "stock": {"max_new_tokens": 100_000}}


@pytest.fixture(scope="module", params=[False, True], ids=["generate", "continuous"])
def server(request, trained_path):
    with served(trained_path, request.param) as server:
        yield server


@pytest.fixture(scope="module", params=[False, True], ids=["generate", "continuous"])
def small(request, trained_path):
    with served(trained_path, request.param, max_model_len=POSITIONS) as server:
        yield server


@pytest.fixture(scope="module")
def stock(trained_path):
    return AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32).eval()


def body(path, stream=False, **settings):
    fields = {**PROMPTS[path], "stream": stream}
    return json.dumps(fields | ({"generation_config": json.dumps(settings)} if settings else {})).encode()


def soon(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


@pytest.fixture
def num_checks(monkeypatch):
    """How often calls of `model.generate` looked whether their client is still there: once a step."""
    counted, check = [], EndOfCall.check
    monkeypatch.setattr(EndOfCall, "check", lambda self: (counted.append(0), check(self)))
    return lambda: len(counted)


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_ends_its_request(server, monkeypatch, num_checks, way, stream):
    """Whoever makes its tokens, and whether they are streamed: a step later no more come, and its blocks are free."""
    monkeypatch.setattr(requests, "LEAST_ROOM", 10**6)
    path = ENDPOINTS[(list(WAYS).index(way) + stream) % 3]

    def progress():  # `stats` would wait for the end of a call in lockstep
        return num_checks() + (server.engine().stats().num_steps if way == "native" else 0)

    before = progress()
    connection = server.send(path, body(path, stream, **ENDLESS | WAYS[way]))
    assert soon(lambda: progress() > before + 20)
    connection.close()
    assert server.settles()
    assert server.post(CHAT, body(CHAT, **ALONE))[0] == 200  # the thread of `model.generate` is free
    done = progress()
    time.sleep(0.1)
    assert progress() == done < before + 1500
    assert server.health() == 200


def test_a_request_in_line_never_runs_if_its_client_leaves(server, monkeypatch, num_checks):
    """In the server without continuous batching, and for what it does not carry out, requests wait for each other."""
    monkeypatch.setattr(requests, "LEAST_ROOM", 10**6)
    generate, calls = server.model.generate, []
    server.post(TEXT, body(TEXT, **ALONE))  # the engine is there
    monkeypatch.setattr(server.model, "generate", lambda **kwargs: calls.append(0) or generate(**kwargs))
    endless, before = ENDLESS | WAYS["stock"], num_checks()
    first = server.send(TEXT, body(TEXT, **endless))
    assert soon(lambda: num_checks() > before + 5)
    second = server.send(TEXT, body(TEXT, **endless))
    third = server.send(TEXT, body(TEXT, True, **endless))
    time.sleep(0.2)
    for connection in (second, third, first):
        connection.close()
    assert server.post(TEXT, body(TEXT, **ALONE))[0] == 200
    assert len(calls) == 2  # the first and the last


def test_clients_may_choose_the_same_request_id(server):
    """Each gets its own answer, under the id that it asked for."""
    prompts = [f"count from {i} to {i + 4}" for i in range(3)]

    def ask(prompt, headers=None):
        return server.post(TEXT, json.dumps({"prompt": prompt, "max_tokens": 12}).encode(), headers)

    expected = [ask(prompt)[1]["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda prompt: ask(prompt, {"X-Request-Id": "mine"}), prompts))
    assert [reply["choices"][0]["text"] for _, reply in replies] == expected
    assert {reply["id"] for _, reply in replies} == {"mine"}


def test_all_that_runs_for_a_request_runs_under_its_salt(monkeypatch):
    """Also the token that is drawn to find out whether its settings broke the numbers."""
    model, ids, salts = hf_paged.enable(tiny_model()), torch.tensor([[5] * 40]), []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **kwargs: salts.append(salt_of_call()) or generate(**kwargs))
    none_left = GenerationConfig(max_new_tokens=4, do_sample=True, suppress_tokens=list(range(256)), guidance_scale=1.5)

    async def refused():
        call = ServedCall("a tenant")
        with pytest.raises(RefusedRequestError, match="probability tensor"):
            GeneratesFor(model, call).generate(none_left, input_ids=ids, attention_mask=torch.ones_like(ids))

    asyncio.run(refused())
    assert salts == [salt_digest("a tenant")] * 2


@pytest.mark.parametrize("stop", [False, True], ids=["plain", "stop"])
def test_tenants_do_not_hit_each_others_cache(server, stop):
    """The salt is the header's, else the API key's, else none; whoever makes the tokens."""
    prompt = f"{'stop' if stop else 'plain'} " + "count from 3 to 7 " * 12

    def computed(**headers):
        before = server.engine().stats().num_prefill_tokens
        fields = {"prompt": prompt, "max_tokens": 1} | ({"stop": ["never"]} if stop else {})
        status, reply = server.post(TEXT, json.dumps(fields).encode(), headers)
        assert status == 200
        return server.engine().stats().num_prefill_tokens - before, reply["usage"]["prompt_tokens"]

    tenants = [{}, {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}, {"X-Cache-Salt": "one"},
               {"Authorization": "Bearer one", "X-Cache-Salt": "both"}]
    for tenant in tenants:
        new, length = computed(**tenant)
        assert new == length > 32
    same = [*tenants, {"Authorization": "bearer  one"}, {"Authorization": "Bearer "}, {"Authorization": "Basic one"},
            {"Authorization": "Bearer three", "X-Cache-Salt": "both"}]
    assert all(computed(**tenant)[0] <= 16 for tenant in same)


def ask_text(server, prompt, stream=False, **fields):
    status, said = server.post(TEXT, json.dumps({"prompt": prompt, "stream": stream, **fields}).encode())
    assert status == 200, said
    if not stream:
        choice = said["choices"][0]
        return choice["text"], choice["finish_reason"], said["usage"]["completion_tokens"]
    chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: ")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    return text, chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_has_too_little_room_is_served_as_stock_serves_it(small, stock, trained_tokenizer, stream):
    """A prompt that leaves fewer positions than it asks for."""
    prompt = "count from 3 to 7 " * 14
    ids = trained_tokenizer(prompt, return_tensors="pt")
    length = ids["input_ids"].shape[1]
    assert POSITIONS - NEW < length < POSITIONS
    made = stock.generate(**ids, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0)[0, length:]
    expected = trained_tokenizer.decode(made, skip_special_tokens=True)
    config = json.dumps({"max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0})
    text, reason, count = ask_text(small, prompt, stream, generation_config=config)
    assert (text, reason, count) == (expected, "length", NEW)
    assert small.settles()
    assert small.health() == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_has_no_room_at_all_is_refused(small, trained_tokenizer, stream):
    """A prompt that fills the positions of the engine, or more."""
    prompt = "count from 3 to 7 " * 40
    length = len(trained_tokenizer(prompt)["input_ids"])
    status, said = small.post(TEXT, json.dumps({"prompt": prompt, "stream": stream, "max_tokens": 1}).encode())
    assert status == 400
    assert f"the prompt has {length:,} tokens: expected at most {POSITIONS - 1:,}" in said["error"]["message"]
    assert small.settles() and small.health() == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_with_much_room_ends_at_the_limit(small, trained_tokenizer, monkeypatch, stream):
    """Where the prompt leaves as much room as the server gives by default, a longer wish ends there, as of length."""
    if not small.is_continuous:
        pytest.skip("model.generate goes on in stock")
    monkeypatch.setattr(requests, "LEAST_ROOM", 8)
    config = json.dumps({"max_new_tokens": 5000, "eos_token_id": -1})
    text, reason, count = ask_text(small, "count from 3 to 7", stream, generation_config=config)
    assert (reason, count) == ("length", POSITIONS - len(trained_tokenizer("count from 3 to 7")["input_ids"]))
    assert text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_the_engine_refuses_runs_alone(server, monkeypatch, stream):
    """Whatever it is that the engine does not take of one request: the others go on, and it gets its answer."""
    if not server.is_continuous:
        pytest.skip("nothing is taken in from a queue")
    expected = ask_text(server, "count from 3 to 7", stream, max_tokens=7)
    asked, settings_of = [], batched_calls.request_settings

    def refusing(engine, request):
        if request.max_new_tokens == 7:
            asked.append(request)
            raise ValueError("no sevens here")
        return settings_of(engine, request)

    monkeypatch.setattr(batched_calls, "request_settings", refusing)
    with ThreadPoolExecutor(4) as pool:
        sevens = pool.map(lambda _: ask_text(server, "count from 3 to 7", stream, max_tokens=7), range(2))
        others = pool.map(lambda _: ask_text(server, "count from 3 to 7", stream, max_tokens=6), range(2))
    assert list(sevens) == [expected] * 2
    assert all(count <= 6 for _, _, count in others)
    assert len(asked) == 2
    assert server.health() == 200


def test_an_error_of_the_server_stays_one(trained_path, monkeypatch):
    """An exception that no body asked for answers 500, and is not told as the client's."""
    with served(trained_path, False) as server:
        assert server.post(CHAT, body(CHAT, max_new_tokens=1))[0] == 200

        def broken(**kwargs):
            raise ValueError("the roof is on fire")

        monkeypatch.setattr(server.engine()._core, "step", broken)
        for path in (CHAT, TEXT, RESPONSES):
            status, said = server.post(path, body(path, max_new_tokens=1))
            assert status == 500
            assert "roof" not in said
        status, said = server.post(TEXT, body(TEXT, True, max_new_tokens=1))
        assert (status, "error" in said) == (200, True)  # as stock's server tells it


def test_an_error_of_a_forward_is_not_the_settings(server, monkeypatch):
    """Also where a logits processor called the model: what a forward raises says nothing about the request."""
    forward, calls = Qwen3MLP.forward, []

    def breaks_in_the_second(self, hidden):
        calls.append(0)
        if len(calls) > server.model.config.num_hidden_layers:
            raise ValueError("the roof is on fire")
        return forward(self, hidden)

    settings = {"max_new_tokens": 2, "guidance_scale": 1.5}
    assert server.post(TEXT, body(TEXT, **settings))[0] == 200
    with monkeypatch.context() as patches:
        patches.setattr(Qwen3MLP, "forward", breaks_in_the_second)
        assert server.post(TEXT, body(TEXT, **settings))[0] == 500
    assert len(calls) > server.model.config.num_hidden_layers
    assert server.post(TEXT, body(TEXT, **settings))[0] == 200
