"""LoRA adapters of a served model: loaded beside it, listed, and named in the `model` field."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_adapters import NAMES, QUESTION, expected_answers, saved_adapters
from serve_support import Server, openai, uninstall_serving

import hf_paged
from hf_paged.server.adapters import split_adapters
from hf_paged.server.server import install_serving


@pytest.fixture(scope="module")
def stock(trained_path, tmp_path_factory):
    return saved_adapters(trained_path, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(params=[pytest.param(False, id="generate", marks=pytest.mark.slow),
                        pytest.param(True, id="continuous")])
def server(request, trained_path, stock):
    hf_paged.install()
    install_serving(stock[1])
    try:
        server = Server(trained_path, request.param)
        yield server
        server.close()
    finally:
        uninstall_serving()
        hf_paged.uninstall()


@pytest.fixture(scope="module")
def expected(stock, trained_tokenizer):
    return expected_answers(stock[0], trained_tokenizer)


def ask(server, model, **options):
    answer = server.client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, **options)
    assert answer.model.split("@")[0] == model
    return answer.choices[0].message.content


def test_an_adapters_name_selects_it(server, expected):
    """Whole and streamed, alone and all at once; the model's own id is the model without adapters."""
    assert {name: ask(server, name) for name in NAMES} == {name: expected[name] for name in NAMES}
    assert ask(server, server.path) == expected["__base__"]
    with ThreadPoolExecutor(6) as pool:
        names = [*NAMES, server.path] * 3
        assert list(pool.map(lambda name: ask(server, name), names)) == [
            expected.get(name, expected["__base__"]) for name in names]
    chunks = server.client.chat.completions.create(model="red", messages=QUESTION, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected["red"]
    assert server.settles()


def test_every_endpoint_and_beams(server, stock, trained_tokenizer, expected):
    """Responses and completions, choices that share a prompt, and what runs by `model.generate`."""
    answer = server.client.responses.create(model="blue", input=QUESTION, max_output_tokens=12, stream=False)
    assert answer.output_text == expected["blue"]
    prompt = trained_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    made = server.client.completions.create(model="red", prompt=prompt, max_tokens=12, n=2)
    assert [choice.text for choice in made.choices] == [expected["red"]] * 2
    beams = json.dumps({"num_beams": 2, "max_new_tokens": 12, "eos_token_id": trained_tokenizer.eos_token_id})
    found = ask(server, "red", extra_body={"generation_config": beams})
    assert found == expected_answers(stock[0], trained_tokenizer, num_beams=2)["red"]


def test_an_unknown_model_is_refused_with_what_there_is(server):
    with pytest.raises(openai.BadRequestError, match=r"requested 'green'.*blue, red"):
        ask(server, "green")


def test_adapters_are_listed(server):
    with urllib.request.urlopen(f"{server.url}/v1/models") as reply:
        listed = json.load(reply)["data"]
    found = {entry["id"]: entry["parent"] for entry in listed if "parent" in entry}
    assert sorted(found) == sorted(NAMES)
    assert {parent.split("@")[0] for parent in found.values()} == {server.path}


def test_an_adapter_that_is_deleted_while_the_server_runs(server, expected):
    """Its name is unknown from then on; requests of others go on."""
    assert ask(server, "red") == expected["red"]
    server.engine().delete_adapter("red")
    with pytest.raises(openai.BadRequestError, match="requested 'red'"):
        ask(server, "red")
    assert ask(server, "blue") == expected["blue"]
    assert ask(server, server.path) == expected["__base__"]


def test_the_command_line():
    assert split_adapters(["m", "--adapter", "a=/x", "--port", "1", "--adapter=b=c=d"]) == (
        {"a": "/x", "b": "c=d"}, ["m", "--port", "1"])
    for wrong in (["--adapter", "a"], ["--adapter", "=x"], ["--adapter", "a=1", "--adapter", "a=2"]):
        with pytest.raises(SystemExit):
            split_adapters(wrong)


def test_adapters_need_a_model_on_the_command_line(stock):
    install_serving(stock[1])
    try:
        with pytest.raises(ValueError, match="--adapter: expected a model"):
            Server(None, False)
    finally:
        uninstall_serving()
