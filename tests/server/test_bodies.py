"""Malformed and odd bodies over HTTP: what transformers' server carries out is carried out, the rest is explained."""

from __future__ import annotations

import json
import logging

import pytest
from hostile_values import FEW
from serve_bodies import CHAT, ENDPOINTS, SETTINGS, TEXT, bodies, encoded, hostile_bodies
from serve_support import Server, served
from transformers import GenerationConfig

from hf_paged.integration.continuous_batching.manager import PagedBatchingManager
from hf_paged.server.requests import ServedRequests

MORE = ('{"stop": []}',)  # it asks for nothing, and stock breaks on it
# What stock drops, or rounds, where it answers 200: the temperature and the filter of greedy answers, for example.
LESS = ('{"input": [{"type": "no such type", "x": 1}]}',
        '{"temperature": -1.0}', '{"temperature": NaN}', '{"temperature": Infinity}', '{"top_p": 2.0}',
        '{"top_p": -0.5}', '{"seed": 1.5}', '{"tools": [{}]}', '{"stop": ""}', '{"stop": {"x": 1}}', "max_tokens=1.5",
        '{"max_completion_tokens": "x"}',  # which older versions of transformers do not read
        json.dumps({"generation_config": json.dumps({"max_new_tokens": 2, "no_such_field": 1})}))
# Fields of which the server's answers hold nothing, so that it does not read them; stock's breaks on what they bring.
NOT_TOKENS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Fields with values that stock cannot turn into its tensors, and that mean no token, nothing or a number to the engine.
READ_BY_THE_ENGINE = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "stop_strings",
                      "temperature")


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """The stock server logs a traceback for each of its errors."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def carried_out(request, trained_path, _quiet):
    """Whether transformers' own server, without hf_paged and by `model.generate`, answers each body with 200.

    Bodies with odd settings are many: it is asked about them where a test looks at them.
    """
    is_wanted = any(item.function is test_no_setting_is_the_servers_fault for item in request.session.items)
    server = Server(trained_path, continuous_batching=False)
    try:
        plain = {(name, path): server.post(path, body)[0] == 200 for name, path, body in bodies()}
        odd = hostile_bodies() if is_wanted else ()
        return plain | {(field, value): server.post(TEXT, body)[0] == 200 for field, value, body in odd}
    finally:
        server.close()


@pytest.fixture(scope="module", params=[pytest.param(False, id="generate", marks=pytest.mark.slow),
                                        pytest.param(True, id="continuous")])
def server(request, trained_path, carried_out):
    with served(trained_path, request.param) as server:
        yield server


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_a_body_is_carried_out_or_explained(server, carried_out, stream):
    """200 where stock's server carries it out; else 400 or 422 with the reason, as the OpenAI API words errors. A body
    that is refused leaves nothing behind: the server is healthy, and answers the next."""
    wrong = []
    for name, path, body in bodies(stream):
        status, said = server.post(path, body)
        if status == 200:
            may_pass = name not in LESS and (carried_out[name, path] or name in MORE)
            as_expected = may_pass and not (stream and '"error": ' in said)
        else:
            as_expected = is_explained(status, said) and (not carried_out[name, path] or name in LESS)
        if not as_expected:
            wrong.append((name, path, status, said))
    assert not wrong
    assert sum(carried_out.values()) > 15
    assert server.health() == 200
    for path in ENDPOINTS:
        assert server.post(path, encoded(path, {}, stream))[0] == 200
    assert server.settles()


def is_explained(status, said, word=""):
    """Is this an answer that blames the request, and names this field?"""
    reason = said["error"] if isinstance(said, dict) else {}
    explained = reason.get("type") == "invalid_request_error" and len(reason["message"]) > 3
    return status in (400, 422) and explained and word in reason["message"]


def test_all_settings_are_tried():
    assert {*SETTINGS, "assistant_early_exit"} == {name for name in vars(GenerationConfig()) if name[0] != "_"}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore")
def test_no_setting_is_the_servers_fault(server, carried_out, stream):
    """Every field of a GenerationConfig with odd values: 200 where stock's server says so, else 400 with the field.

    Each value of a field is for one of the four kinds of answer.
    """
    wrong, more = [], (*NOT_TOKENS, *(READ_BY_THE_ENGINE if server.is_continuous else ()))
    for field, value, body in hostile_bodies(stream)[2 * server.is_continuous + stream :: 4]:
        status, said = server.post(TEXT, body)
        expected = carried_out[field, value]
        if status == 200 and stream and '"error": ' in said:  # after the first token, as in stock
            last = json.loads(said.split("data: ")[-1])["error"]
            as_expected = not expected and '"text":' in said and field in last and "generation settings" in last
        elif status == 200:
            as_expected = expected or field in more
        else:
            as_expected = not expected and is_explained(status, said, field)
        if not as_expected:
            wrong.append((field, value, status, said))
    assert not wrong
    assert server.health() == 200
    assert server.post(TEXT, encoded(TEXT, {}, stream))[0] == 200
    assert server.settles()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_no_request_takes_layers_off_the_model(server, stream):
    """Stock's server answers nothing any more after one of these."""
    before = server.post(TEXT, encoded(TEXT, {}))[1]["choices"]
    for value in [1, *FEW[:-1]]:
        config = json.dumps({"max_new_tokens": 2, "assistant_early_exit": value})
        assert is_explained(*server.post(TEXT, encoded(TEXT, {"generation_config": config}, stream)),
                            "assistant_early_exit")
        assert server.post(TEXT, encoded(TEXT, {}))[1]["choices"] == before


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("field", NOT_TOKENS)
def test_what_else_generate_would_return_changes_nothing(server, monkeypatch, field, stream):
    """The answer is the text, as in stock's streamed answers, and made in the batch where there is one."""
    if server.is_continuous:
        monkeypatch.delattr(ServedRequests, "_run_alone")
    plain = {"max_new_tokens": 4, "eos_token_id": -1}
    said = [server.post(TEXT, encoded(TEXT, {"generation_config": json.dumps(config)}, stream))
            for config in (plain, plain | {"return_dict_in_generate": True, field: True})]
    assert [status for status, _ in said] == [200, 200]
    texts = [text_of(answer) for _, answer in said]
    assert texts[0] == texts[1] != ""


@pytest.mark.slow
def test_what_the_model_would_return_keeps_nobody_from_the_batch(trained_path):
    with served(trained_path, True) as server:
        server.model.generation_config.return_dict_in_generate = True
        assert server.post(TEXT, encoded(TEXT, {}))[0] == 200
        assert isinstance(server.cb, PagedBatchingManager)


def text_of(said):
    """The text of an answer of `TEXT`, whole or streamed."""
    if isinstance(said, dict):
        return said["choices"][0]["text"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.slow
def test_numbers_that_the_model_breaks_are_the_servers_fault(server, monkeypatch):
    """Stock raises the same where no token can be drawn: of settings the client hears, of the model it does not."""
    config = {"max_new_tokens": 2, "do_sample": True}
    status, said = server.post(TEXT, encoded(TEXT, {"generation_config": json.dumps(config | {"temperature": 1e-300})}))
    assert is_explained(status, said, "temperature=1e-300: expected a float32 number above 0"), said
    nan = server.model.lm_head.weight.new_full(server.model.lm_head.weight.shape, float("nan"))
    monkeypatch.setattr(server.model.lm_head.weight, "data", nan)
    for more in ({}, {"temperature": 1e-300}, {"temperature": 0.5}):
        status, said = server.post(TEXT, encoded(TEXT, {"generation_config": json.dumps(config | more)}))
        assert status == 500, said


def test_the_reason_names_what_is_wrong(server):
    for fields, words in (({"messages": [{}]}, ("messages", "role")),
                          ({"max_tokens": "x"}, ("max_tokens='x'", "an integer of at least 1")),
                          ({"generation_config": "[]"}, ("generation_config", "JSON object")),
                          ({"model": "other"}, ("pinned", "other")), ({"tools": 5}, ("tools",)),
                          ({"generation_config": '{"do_sample": true, "top_k": -1}'}, ("top_k",)),
                          ({"stop": [5]}, ("stop=[5]", "none of them empty"))):
        status, said = server.post(CHAT, encoded(CHAT, fields))
        assert (fields, status) == (fields, 400)
        assert all(word in said["error"]["message"] for word in words), said
        assert said["detail"] == said["error"]["message"]
