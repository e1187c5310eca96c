"""Answers of the server, whoever makes their tokens: where they stop, and how many choices they have."""

from __future__ import annotations

import json

import pytest
from serve_answers import LENGTH, PROMPT, TOOLS, ask, choices_of, text_of
from serve_bodies import CHAT, RESPONSES, TEXT
from serve_support import served


@pytest.fixture(scope="module", params=[False, True], ids=["generate", "continuous"])
def server(request, trained_path):
    with served(trained_path, request.param) as server:
        yield server


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_answer_ends_before_its_stop_text(server, path, stream):
    """Wherever it falls in the tokens, with what comes first, and none of it is ever sent."""
    def parsed(text):  # transformers' parser strips a whole answer
        return text.strip() if path == CHAT and not stream else text

    plain, reason = text_of(ask(server, path=path))
    assert reason == "length" and len(plain) > 8
    for at in range(1, len(plain) - 3, 5):
        stop = plain[at : at + 3]
        answer = ask(server, stream, path, stop=[stop, "never"])
        assert text_of(answer) == (parsed(plain[: plain.index(stop)]), "stop")
        assert answer[-1]["usage"]["completion_tokens"] <= LENGTH
    stop = plain[2:4]
    assert text_of(ask(server, stream, path, stop=stop))[0] == parsed(plain[: plain.index(stop)])
    kept = text_of(ask(server, stream, path, stop=stop, include_stop_str_in_output=True))
    assert kept == (parsed(plain[: plain.index(stop) + 2]), "stop")
    assert text_of(ask(server, stream, path, stop=[plain[-1] + "never"])) == (plain, "length")  # held back, then sent
    assert text_of(ask(server, stream, path, stop=[])) == (plain, "length")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_choices_are_requests_of_one_prompt(server, path, stream):
    """Each under its index, with a seed of its own; the prompt counts once."""
    sampled = {"temperature": 2.0, "seed": 3, "max_tokens": 6}
    answer = ask(server, stream, path, n=4, **sampled)
    pieces, reasons = choices_of(answer)
    assert sorted(pieces) == [0, 1, 2, 3] and set(reasons.values()) == {"length"}
    texts = ["".join(pieces[index]) for index in range(4)]
    assert len(set(texts)) > 1
    again = choices_of(ask(server, stream, path, n=4, **sampled))[0]
    assert ["".join(again[index]) for index in range(4)] == texts
    assert text_of(ask(server, stream, path, **sampled))[0] == texts[0]
    one = ask(server, path=path, max_tokens=6)[0]["usage"]
    usage = [chunk["usage"] for chunk in answer if "usage" in chunk]
    assert usage == [{"prompt_tokens": one["prompt_tokens"], "completion_tokens": 24,
                      "total_tokens": one["prompt_tokens"] + 24}]
    config = json.dumps({"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 4})
    other = choices_of(ask(server, stream, path, generation_config=config, **sampled))[0]
    assert ["".join(other[index]) for index in range(4)] == texts
    greedy = choices_of(ask(server, stream, path, n=2, max_tokens=6, best_of=2) if path == TEXT else ask(
        server, stream, path, n=2, max_tokens=6))[0]
    assert "".join(greedy[0]) == "".join(greedy[1]) != ""


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_drafts_that_are_accepted_are_streamed_once(server, path):
    """Several tokens come at a time then, and count as such."""
    config = json.dumps({"prompt_lookup_num_tokens": 3})
    fields = {"generation_config": config, "ignore_eos": True, "max_tokens": LENGTH}
    whole, streamed = (ask(server, stream, path, **fields) for stream in (False, True))
    assert text_of(streamed)[0].strip() == text_of(whole)[0].strip()
    assert len(text_of(streamed)[0]) >= LENGTH
    assert streamed[-1]["usage"] == whole[-1]["usage"]


@pytest.mark.parametrize(("config", "fields", "message"), [
    ({"sequence_bias": [[[5], 9.0]]}, {"logit_bias": {"6": 1}}, "logit_bias: expected no sequence_bias"),
    ({"stop_strings": ["qu"]}, {"stop": "zzz"}, "stop: expected no stop_strings"),
    ({"nope": 1}, {}, "generation_config: expected names of a GenerationConfig, not 'nope'"),
])
def test_a_generation_config_that_says_something_else_than_a_field_is_refused(server, config, fields, message):
    body = {"prompt": PROMPT, "max_tokens": 6}
    status, answer = server.post(TEXT, json.dumps({**body, "generation_config": json.dumps(config), **fields}).encode())
    assert status == 400 and message in str(answer)
    config = {name: value for name, value in config.items() if name != "nope"}
    fields = {"logit_bias": {}, "stop": []} if config else {}
    same = [server.post(TEXT, json.dumps({**body, "generation_config": json.dumps(config), **more}).encode())
            for more in ({}, fields)]
    assert [status for status, _ in same] == [200, 200]
    assert same[0][1]["choices"] == same[1][1]["choices"]


def test_log_probabilities_of_what_cannot_run_in_the_batch_are_refused(server):
    """Beams do not, and without continuous batching nothing does."""
    config = json.dumps({"max_new_tokens": 3, "num_beams": 2} if server.is_continuous else {"max_new_tokens": 3})
    fields = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "generation_config": config}
    for stream in (False, True):
        status, said = server.post(CHAT, json.dumps({**fields, "stream": stream}).encode())
        assert status == 400 and "logprobs: expected it left out" in said["error"]["message"]
        penalised = {**fields, "logprobs": False, "presence_penalty": 1, "stream": stream}
        status, said = server.post(CHAT, json.dumps(penalised).encode())
        assert status == 400 and "presence_penalty: expected it left out" in said["error"]["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_usage_comes_as_a_chunk_of_its_own_where_asked(server, path):
    last = ask(server, True, path, stream_options={"include_usage": True})[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == LENGTH
    assert ask(server, True, path)[-1]["choices"]


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "fields"), [
    (CHAT, {"tools": TOOLS}), (RESPONSES, {"tools": [{"type": "function", "name": "look_up", "parameters": {}}]}),
    (CHAT, {"reasoning_effort": "low"}), (RESPONSES, {"reasoning": {"effort": "low"}}),
])
def test_what_the_chat_template_does_not_look_at_is_refused(server, path, fields, stream, monkeypatch):
    tokenizer = next(iter(server._serve._model_manager.loaded_models.values())).processor
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"input": "hi"}
    status, said = server.post(path, json.dumps({**prompt, **fields, "stream": stream}).encode())
    assert status == 400
    assert "chat template does not refer to" in said["error"]["message"]


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}{{ documents }}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_the_chat_template_refers_to_reaches_it_and_all_else_is_refused(server, stream, monkeypatch):
    """Told by the number of the prompt's tokens, whose greedy answer need not change."""
    tokenizer = next(iter(server._serve._model_manager.loaded_models.values())).processor
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)

    def tokens(**keywords):
        said = ask(server, stream, CHAT, chat_template_kwargs=keywords)
        return next(chunk["usage"]["prompt_tokens"] for chunk in said if "usage" in chunk)

    plain = tokens()
    assert tokens(mark=" qu qu") > plain < tokens(documents=[{"title": "a b", "text": "c"}])
    assert tokens(chat_template="{{ other }} x", other="a b c d e f g h i j k l m n o p") != plain
    assert tokens(truncation=True, max_length=3) == 3
    for keywords, words in (({"marc": 1}, "marc=1: expected it left out, since the model's chat template does not "
                                           "refer to it (it refers to documents, mark)"),
                            ({"tokenizer_kwargs": {}}, "tokenizer_kwargs={}: expected it left out"),
                            ({"max_length": 3}, "max_length=3, expected an integer of at least 1, and truncation"),
                            ({"truncation": "longest_first"}, "truncation='longest_first', expected true or false"),
                            ({"chat_template": TEMPLATE, "enable_thinking": True}, "enable_thinking=True: expected"),
                            ({"chat_template": "{{ other }} x", "mark": 1}, "mark=1: expected"),
                            ({"continue_final_message": True}, "continue_final_message"),
                            ({"tokenize": True}, "chat_template_kwargs={'tokenize': True}: expected an object")):
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": stream, "chat_template_kwargs": keywords}
        status, said = server.post(CHAT, json.dumps(body).encode())
        assert status == 400 and words in said["error"]["message"], (keywords, said)


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_part_that_the_model_does_not_read_is_refused(server, path, stream):
    """transformers' handler leaves an image out of what it tells a model of texts."""
    image = {CHAT: {"type": "image_url", "image_url": {"url": "x"}},
             RESPONSES: {"type": "input_image", "image_url": "x"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image[path]]}]
    body = {"messages" if path == CHAT else "input": messages, "stream": stream}
    status, said = server.post(path, json.dumps(body).encode())
    assert status == 400
    assert f"a part of type='{image[path]['type']}', expected what this model reads: input_text" in str(said)


def test_null_is_as_good_as_left_out(server):
    """But for `stream` of the Responses API, which is whole by null and streamed when it is left out, as in stock."""
    fields = {"temperature": None, "stop": None, "n": None, "suffix": None, "generation_config": None}
    body = {"prompt": PROMPT, "max_tokens": 3}
    both = [server.post(TEXT, json.dumps({**body, **more}).encode()) for more in ({}, fields, {"stream": None})]
    assert [status for status, _ in both] == [200] * 3
    assert len({said["choices"][0]["text"] for _, said in both}) == 1
    body = {"input": PROMPT, "max_output_tokens": 3}
    assert isinstance(server.post(RESPONSES, json.dumps({**body, "stream": None}).encode())[1], dict)
    assert isinstance(server.post(RESPONSES, json.dumps(body).encode())[1], str)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "chat_template_kwargs": None}
    assert server.post(CHAT, json.dumps(chat).encode())[0] == 200
