"""Clients of the server that leave, that send what there is no room for, and that must not learn of each other."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_bodies import CHAT, ENDPOINTS, PROMPTS, RESPONSES, TEXT
from serve_support import events_of, served
from starlette.datastructures import Headers
from support import byte_tokenizer, tiny_model
from transformers import GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_paged.config import PagedConfig
from hf_paged.integration.paths import CALL_SALT
from hf_paged.integration.recognise.criteria import EndOfCall
from hf_paged.integration.recognise.structured import NO_FORM
from hf_paged.options.arguments import salt_digest
from hf_paged.server import app, generation
from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.generation import Generation
from hf_paged.server.lifetime import Exchange
from hf_paged.server.prompts import Prompt
from hf_paged.server.protocol import TextBody, read_body
from hf_paged.server.served_model import ServedModel

pytestmark = pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")

POSITIONS = 128  # that the engine of `small` has; the model has more
NEW = 40
ENDLESS = {"max_new_tokens": 3900, "eos_token_id": -1}
ALONE = {"max_new_tokens": 1, "encoder_repetition_penalty": 1.1}  # no request of a batch
WAYS = {"native": {}, "lockstep": {"encoder_repetition_penalty": 1.1}, "stock": {"max_new_tokens": 100_000}}


@pytest.fixture(scope="module")
def small(trained_path):
    with served(trained_path, PagedConfig(max_model_len=POSITIONS)) as server:
        yield server


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
    monkeypatch.setattr(generation, "LEAST_ROOM", 10**6)
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
    """Requests that the engine does not carry out wait for each other."""
    monkeypatch.setattr(generation, "LEAST_ROOM", 10**6)
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


@pytest.mark.parametrize(("path", "reads"), [(TEXT, "text_prompt"), (CHAT, "chat_prompt")])
def test_a_prompt_that_is_read_stops_no_other_request(server, monkeypatch, path, reads):
    """A long prompt takes seconds, as does an image that the processor fetches."""
    read, is_over = getattr(app, reads), threading.Event()

    def slowly(*given):
        assert is_over.wait(10)
        return read(*given)

    monkeypatch.setattr(app, reads, slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, path, body(path, **ALONE))
        time.sleep(0.2)
        assert server.health() == 200
        is_over.set()
        assert answer.result()[0] == 200


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
    model, salts = tiny_model(), []
    served_model = ServedModel(model, byte_tokenizer(), ["tiny"])
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **kwargs: salts.append(CALL_SALT.get()) or generate(**kwargs))
    none_left = GenerationConfig(max_new_tokens=4, do_sample=True, suppress_tokens=list(range(256)), guidance_scale=1.5)

    async def refused():
        exchange = Exchange(Headers({"X-Cache-Salt": "a tenant"}))
        body = read_body(TextBody, {"prompt": "x"})
        one = Generation(served_model, exchange, body, Prompt([5] * 40), none_left, 1, 0, None, NO_FORM, True, "it")
        with pytest.raises(RefusedRequestError, match="probability tensor"):
            async for _ in one.outputs(stream=False):
                pass
        return exchange.cache_salt

    salt = asyncio.run(refused())
    served_model.close()
    assert salts == [salt] * 2 and salt == salt_digest("header:a tenant")


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
    chunks = events_of(said)
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
    monkeypatch.setattr(generation, "LEAST_ROOM", 8)
    config = json.dumps({"max_new_tokens": 5000, "eos_token_id": -1})
    text, reason, count = ask_text(small, "count from 3 to 7", stream, generation_config=config)
    assert (reason, count) == ("length", POSITIONS - len(trained_tokenizer("count from 3 to 7")["input_ids"]))
    assert text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_the_engine_refuses_runs_alone(server, monkeypatch, stream):
    """Whatever it is that the engine does not take of one request: the others go on, and it gets its answer."""
    expected = ask_text(server, "count from 3 to 7", stream, max_tokens=7)
    asked, spec_of = [], generation.spec_in_room

    def refusing(engine, config, *others, **fields):
        if config.max_new_tokens == 7:
            asked.append(config)
            raise ValueError("no sevens here")
        return spec_of(engine, config, *others, **fields)

    monkeypatch.setattr(generation, "spec_in_room", refusing)
    with ThreadPoolExecutor(4) as pool:
        sevens = pool.map(lambda _: ask_text(server, "count from 3 to 7", stream, max_tokens=7), range(2))
        others = pool.map(lambda _: ask_text(server, "count from 3 to 7", stream, max_tokens=6), range(2))
    assert list(sevens) == [expected] * 2
    assert all(count <= 6 for _, _, count in others)
    assert len(asked) == 2
    assert server.health() == 200


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2, "do_sample": True}, {"encoder_repetition_penalty": 1.5}],
                         ids=["engine", "beams", "stock"])
def test_a_seed_is_of_its_request_alone(server, settings):
    """Answers without a seed stay random after one with a seed, and equal the seed of the server where it has one."""
    config = json.dumps({"max_new_tokens": 24, "eos_token_id": -1, "do_sample": True, "top_k": 0, "temperature": 9.0,
                         **settings})

    def answers():
        made = []
        for _ in range(2):
            ask_text(server, "count from 3 to 7", False, generation_config=config, seed=5)
            made.append(ask_text(server, "count from 3 to 7", False, generation_config=config)[0])
        return made

    first, second = answers()
    assert first != second
    server.served.seed = 5
    try:
        assert answers() == [ask_text(server, "count from 3 to 7", False, generation_config=config, seed=5)[0]] * 2
    finally:
        server.served.seed = None


@pytest.mark.parametrize(("settings", "expected"), [
    ({"max_length": 12}, "length"), ({"max_time": 1e-9, "max_new_tokens": 9}, "length"),
    ({"max_new_tokens": 9, "eos_token_id": 220}, "stop"), ({"max_new_tokens": 99, "stop_strings": "3"}, "stop"),
])
def test_what_generate_ends_has_the_engines_reason(server, settings, expected):
    """Lengths and times cut an answer by any name, and by defaults; EOS and stop strings end it."""
    settings = {"eos_token_id": -1, **settings}
    for more in ({}, {"encoder_repetition_penalty": 1.0001}):
        config = json.dumps({**settings, **more})
        found = [ask_text(server, "count from 3 to 7", stream, generation_config=config) for stream in (False, True)]
        assert [reason for _, reason, _ in found] == [expected] * 2, more
        assert found[0] == found[1]


def test_an_error_of_the_server_stays_one(trained_path, monkeypatch):
    """An exception that no body asked for answers 500, and is not told as the client's."""
    with served(trained_path) as server:
        assert server.post(CHAT, body(CHAT, max_new_tokens=1))[0] == 200

        def broken(**kwargs):
            raise ValueError("the roof is on fire")

        monkeypatch.setattr(server.engine()._core, "step", broken)
        for path in (CHAT, TEXT, RESPONSES):
            for stream in (False, True):
                status, said = server.post(path, body(path, stream, max_new_tokens=1))
                assert (status, said["error"]["type"]) == (500, "server_error")
                assert "roof" not in said["error"]["message"]


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
