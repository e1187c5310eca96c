"""Malformed and odd bodies over HTTP: each is carried out or explained."""

from __future__ import annotations

import json
import logging

import pytest
from hostile_values import FEW
from serve_bodies import CHAT, ENDPOINTS, SETTINGS, TEXT, bodies, encoded, hostile_bodies
from serve_support import events_of, served
from transformers import GenerationConfig

from hf_paged.server.generation import Generation

# Bodies that are carried out. All others are explained, also where transformers' own server answers 200 and drops or
# rounds what was asked for (a temperature below 0, a filter above 1, half a token).
CARRIED_OUT = {
    '{"model": null}', '{"temperature": 1180591620717411303424}', '{"seed": -1}', '{"stop": []}',
    '{"prompt": ["a", "b"]}', '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "nobody", "content": "hi"}]}',
    *(json.dumps({"generation_config": json.dumps({"max_new_tokens": 2, **config})}) for config in (
        {"do_sample": True, "top_p": 7}, {"num_return_sequences": 0}, {"no_repeat_ngram_size": -1},
        {"output_scores": True})),
}
# Fields of which the server's answers hold nothing, so that it does not read them; stock's breaks on what they bring.
NOT_TOKENS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Fields with values that stock cannot turn into its tensors, and that mean no token, nothing or a number to the engine.
READ_BY_THE_ENGINE = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "stop_strings",
                      "temperature")


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """The server logs a traceback for each of its errors."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def server(trained_path, _quiet):
    with served(trained_path) as server:
        yield server


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_a_body_is_carried_out_or_explained(server, stream):
    """200, or 400 or 422 with the reason, as the OpenAI API words errors. A body that is refused leaves nothing behind:
    the server is healthy, and answers the next."""
    wrong, seen = [], set()
    for name, path, body in bodies(stream):
        status, said = server.post(path, body)
        seen.add(name)
        if status == 200:
            as_expected = name in CARRIED_OUT and not (stream and '"error":' in said)
        else:
            as_expected = is_explained(status, said) and name not in CARRIED_OUT
        if not as_expected:
            wrong.append((name, path, status, said))
    assert not wrong
    assert seen > CARRIED_OUT
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


def carries_out(model, tokenizer, body):
    """Whether stock's generate takes the settings of a body."""
    try:
        config = GenerationConfig(**json.loads(body["generation_config"]))
        model.generate(**tokenizer(body["prompt"], return_tensors="pt"), generation_config=config, tokenizer=tokenizer)
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore")
def test_no_setting_is_the_servers_fault(server, stock, stream):
    """Every field of a GenerationConfig with odd values: 200 where stock's generate says so, else 400 with the field.

    Each value of a field is for one of the two kinds of answer.
    """
    wrong, more = [], (*NOT_TOKENS, *READ_BY_THE_ENGINE)
    for field, value, body in hostile_bodies(stream)[stream::2]:
        status, said = server.post(TEXT, body)
        expected = carries_out(stock, server.tokenizer, json.loads(body))
        if status == 200 and stream and '"error":' in said:  # after the first token
            last = events_of(said)[-1]["error"]["message"]
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
    monkeypatch.delattr(Generation, "_stock_outputs")
    plain = {"max_new_tokens": 4, "eos_token_id": -1}
    said = [server.post(TEXT, encoded(TEXT, {"generation_config": json.dumps(config)}, stream))
            for config in (plain, plain | {"return_dict_in_generate": True, field: True})]
    assert [status for status, _ in said] == [200, 200]
    texts = [text_of(answer) for _, answer in said]
    assert texts[0] == texts[1] != ""


@pytest.mark.slow
def test_what_the_model_would_return_keeps_no_request_from_the_engine(server, monkeypatch):
    monkeypatch.setattr(server.model.generation_config, "return_dict_in_generate", True)
    monkeypatch.delattr(Generation, "_stock_outputs")
    assert server.post(TEXT, encoded(TEXT, {}))[0] == 200


def text_of(said):
    """The text of an answer of `TEXT`, whole or streamed."""
    if isinstance(said, dict):
        return said["choices"][0]["text"]
    return "".join(chunk["choices"][0]["text"] for chunk in events_of(said))


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
                          ({"model": "other"}, ("model='other'", server.path)), ({"tools": 5}, ("tools",)),
                          ({"generation_config": '{"do_sample": true, "top_k": -1}'}, ("top_k",)),
                          ({"stop": [5]}, ("stop=[5]", "none of them empty"))):
        status, said = server.post(CHAT, encoded(CHAT, fields))
        assert (fields, status) == (fields, 400)
        assert all(word in said["error"]["message"] for word in words), said
        assert said["detail"] == said["error"]["message"]
