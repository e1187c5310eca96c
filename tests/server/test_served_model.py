"""LoRA adapters of a served model: loaded beside it, listed, and named in the `model` field."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_adapters import NAMES, QUESTION, expected_answers, saved_adapters
from serve_support import openai, served

from hf_paged.errors import EngineClosedError
from hf_paged.server.errors import EngineDeadError
from hf_paged.server.served_model import ServedModel


@pytest.fixture(scope="module")
def stock(trained_path, tmp_path_factory):
    return saved_adapters(trained_path, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(trained_path, stock):
    with served(trained_path, adapters=stock[1]) as server:
        yield server


@pytest.fixture(scope="module")
def expected(stock, trained_tokenizer):
    return expected_answers(stock[0], trained_tokenizer)


def ask(server, model, **options):
    answer = server.client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, **options)
    assert answer.model == model
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
    answer = server.client.responses.create(model="blue", input=QUESTION, max_output_tokens=12)
    assert answer.output_text == expected["blue"]
    prompt = trained_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    made = server.client.completions.create(model="red", prompt=prompt, max_tokens=12, n=2)
    assert [choice.text for choice in made.choices] == [expected["red"]] * 2
    beams = json.dumps({"num_beams": 2, "max_new_tokens": 12, "eos_token_id": trained_tokenizer.eos_token_id})
    found = ask(server, "red", extra_body={"generation_config": beams})
    assert found == expected_answers(stock[0], trained_tokenizer, num_beams=2)["red"]


def test_an_unknown_model_is_refused_with_what_there_is(server):
    with pytest.raises(openai.BadRequestError, match=r"model='green': expected a name of this server: .*blue, red"):
        ask(server, "green")


def test_adapters_are_listed(server):
    listed = json.loads(server.get("/v1/models")[1])["data"]
    found = {entry["id"]: entry["parent"] for entry in listed if "parent" in entry}
    assert found == dict.fromkeys(NAMES, server.path)
    assert {entry["id"] for entry in listed} == {server.path, *NAMES}


def test_an_adapter_that_is_deleted_while_the_server_runs(trained_path, stock, expected):
    """Its name is unknown from then on; requests of others go on."""
    with served(trained_path, adapters=stock[1]) as server:
        assert ask(server, "red") == expected["red"]
        server.engine().delete_adapter("red")
        with pytest.raises(openai.BadRequestError, match="model='red'"):
            ask(server, "red")
        assert ask(server, "blue") == expected["blue"]
        assert ask(server, server.path) == expected["__base__"]


def test_a_call_that_the_thread_has_not_begun_fails_when_it_ends(trained_model, trained_tokenizer):
    """Its client would wait for ever."""
    async def begun():
        served_model = ServedModel(trained_model, trained_tokenizer, ["tiny"])
        thread = served_model.thread
        with thread.pause():  # so that the thread cannot take the call
            call = served_model.new_call(stream=False)
            waiting = asyncio.ensure_future(served_model.begin(call, []))
            await asyncio.sleep(0)
            thread_stop(thread)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(waiting, 30)
        assert not served_model.is_alive
        with pytest.raises(EngineDeadError):
            await served_model.begin(served_model.new_call(stream=False), [])
        served_model.close()

    asyncio.run(begun())


def thread_stop(thread):
    """Stop a thread that this one pauses."""
    stopping = threading.Thread(target=lambda: thread.stop(now=True))
    stopping.start()
    stopping.join()
