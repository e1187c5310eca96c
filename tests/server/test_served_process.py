"""What a server process of its own answers to requests that would hold others up: slow forms, prompts that are too
long; and to the names of adapters."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_adapters import NAMES, QUESTION, expected_answers, saved_adapters
from served_process import ServerProcess, openai

pytest.importorskip("fastapi")
pytest.importorskip("xgrammar", reason="of the extra `structured`")

pytestmark = pytest.mark.slow  # a server in a process of its own; the core tier has that of test_lifetime.py

POSITIONS, SECONDS, BYTES = 300, 1.0, 60_000


@pytest.fixture(scope="module")
def saved(trained_path, tmp_path_factory):
    return saved_adapters(trained_path, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(trained_path, saved, tmp_path_factory):
    adapters = [argument for name, path in saved[1].items() for argument in ("--adapter", f"{name}={path}")]
    options = ["--max-model-len", str(POSITIONS), "--structured-max-seconds", str(SECONDS),
               "--engine", f"structured_max_bytes={BYTES}", "--served-model-name", trained_path]
    server = ServerProcess(trained_path, "--continuous-batching", *adapters, *options,
                           log=tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


def deep_schema(depth, name):
    schema = {"type": "string"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"{name}{level}": schema}, "required": [f"{name}{level}"],
                  "additionalProperties": False}
    return schema


def chat(server, model=None, **fields):
    return server.client.chat.completions.create(model=model or server.path, messages=QUESTION, max_tokens=12, **fields)


def regex(server, expression):
    return chat(server, extra_body={"structured_outputs": {"regex": expression}}).choices[0].message.content


def refused(server, **fields):
    """The reason of a 400, and how long that took."""
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, **fields)
    return caught.value.body["message"], time.monotonic() - began


def test_slow_forms_hold_up_neither_a_new_form_nor_a_known_one(server):
    """Ten schemas, each of which takes many times the limit to compile."""
    assert regex(server, "[0-9]{3}").isdecimal()  # the vocabulary is read

    def slow(number):
        schema = {"name": "deep", "schema": deep_schema(320, "abcdefghij"[number])}
        return refused(server, response_format={"type": "json_schema", "json_schema": schema})

    took = []
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(slow, range(10))
        time.sleep(0.5)
        for number in range(3):
            for expression in ("[0-9]{3}", f"[a-z]{{{number + 4}}}"):
                began = time.monotonic()
                assert regex(server, expression)
                took.append(time.monotonic() - began)
        began = time.monotonic()
        assert chat(server).choices[0].message.content
        took.append(time.monotonic() - began)
        reasons, times = zip(*answers, strict=True)
    assert all("response_format" in reason and f"structured_max_seconds={SECONDS:g}" in reason for reason in reasons)
    assert max(took) < max(times) / 2
    assert regex(server, "[0-9]{3}")


def test_a_form_that_is_too_large_is_refused_at_once(server):
    choices = {"structured_outputs": {"choice": [f"choice number {i} of many" for i in range(20_000)]}}
    reason, seconds = refused(server, extra_body=choices)
    assert "structured_outputs: it has 608,890 bytes" in reason and f"structured_max_bytes={BYTES:,}" in reason
    assert seconds < 5


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}])
def test_a_form_that_no_output_has_is_refused(server, schema):
    reason, _ = refused(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    # xgrammar has an error of its own for the first from 0.2.9 on
    assert "no output that ends has this form" in reason or "Circular $ref chain" in reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [POSITIONS - 1, POSITIONS, 4 * POSITIONS])
def test_a_prompt_without_room_for_an_answer_is_refused(server, trained_tokenizer, number, stream):
    """At once, with its length and the longest one; one token less has an answer of one token."""
    prompt = trained_tokenizer.decode(trained_tokenizer("7")["input_ids"] * number)
    assert len(trained_tokenizer(prompt)["input_ids"]) == number
    asked = {"model": server.path, "prompt": prompt, "max_tokens": 1, "stream": stream}
    if number < POSITIONS:
        answer = server.client.completions.create(**asked)
        assert list(answer) if stream else answer.usage.completion_tokens == 1
        return
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match=f"the prompt has {number:,} tokens: expected at most "
                                                     rf"{POSITIONS - 1}.*{POSITIONS}.*max_model_len"):
        server.client.completions.create(**asked)
    with pytest.raises(openai.BadRequestError, match="expected at most"):
        server.client.responses.create(model=server.path, input=prompt, stream=stream)
    assert time.monotonic() - began < 5


def test_adapters_are_loaded_and_selected_by_their_names(server, saved, trained_tokenizer):
    expected = expected_answers(saved[0], trained_tokenizer)
    with ThreadPoolExecutor(6) as pool:
        names = [*NAMES, "__base__"] * 2
        made = pool.map(lambda name: chat(server, None if name == "__base__" else name), names)
        assert [one.choices[0].message.content for one in made] == [expected[name] for name in names]
    assert {entry.id for entry in server.client.models.list()} >= {*NAMES}
