"""Answers of the chat and the completions endpoint: where they stop, choices, log-probabilities, tool calls."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from serve_answers import LENGTH, PROMPT, TOOLS, ask, choices_of, text_of
from serve_bodies import CHAT, RESPONSES, TEXT
from serve_support import events_of
from support import run_out
from transformers import GenerationConfig

from hf_paged.engine.text import StopPolicy
from hf_paged.outputs import Completion, StepOutput
from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.generation import Generation
from hf_paged.server.prompts import check_for_model
from hf_paged.server.protocol import ChatBody, read_body


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
    """Beams do not."""
    config = json.dumps({"max_new_tokens": 3, "num_beams": 2})
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
    tokenizer = server.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"input": "hi"}
    status, said = server.post(path, json.dumps({**prompt, **fields, "stream": stream}).encode())
    assert status == 400
    assert "chat template does not refer to" in said["error"]["message"]


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}{{ documents }}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_the_chat_template_refers_to_reaches_it_and_all_else_is_refused(server, stream, monkeypatch):
    """Told by the number of the prompt's tokens, whose greedy answer need not change."""
    tokenizer = server.tokenizer
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
    image = {CHAT: {"type": "image_url", "image_url": {"url": "x"}},
             RESPONSES: {"type": "input_image", "image_url": "x"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image[path]]}]
    body = {"messages" if path == CHAT else "input": messages, "stream": stream}
    status, said = server.post(path, json.dumps(body).encode())
    assert status == 400
    assert f"a part of type='{image[path]['type']}', expected what this model reads: input_text" in str(said)


def test_null_is_as_good_as_left_out(server):
    """Also for `stream`, without which an answer is whole at each endpoint."""
    fields = {"temperature": None, "stop": None, "n": None, "suffix": None, "generation_config": None}
    body = {"prompt": PROMPT, "max_tokens": 3}
    both = [server.post(TEXT, json.dumps({**body, **more}).encode()) for more in ({}, fields, {"stream": None})]
    assert [status for status, _ in both] == [200] * 3
    assert len({said["choices"][0]["text"] for _, said in both}) == 1
    body = {"input": PROMPT, "max_output_tokens": 3}
    for more in ({}, {"stream": None}):
        assert server.post(RESPONSES, json.dumps({**body, **more}).encode())[1]["object"] == "response"
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "chat_template_kwargs": None}
    assert server.post(CHAT, json.dumps(chat).encode())[0] == 200


def test_a_request_with_a_stop_text_runs_in_the_batch_and_ends_there(server, monkeypatch):
    """Together with others that have none, or their own; the engine makes no tokens after it."""
    monkeypatch.delattr(Generation, "_stock_outputs")
    plain = text_of(ask(server))[0]
    stops = [None, plain[2:4], [plain[3:5], "x"], plain[-2:], "never"]
    before = server.engine().stats().num_generated_tokens
    with ThreadPoolExecutor(len(stops)) as pool:
        answers = list(pool.map(lambda stop: ask(server, stop=stop)[0], stops))
    made = server.engine().stats().num_generated_tokens - before
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [plain, *(plain[: plain.index(stop)] for stop in (plain[2:4], plain[3:5], plain[-2:])), plain]
    lengths = [answer["usage"]["completion_tokens"] for answer in answers]
    assert lengths[0] == lengths[4] == LENGTH > lengths[1]
    assert sum(lengths) <= made <= sum(lengths) + len(stops)  # a stop is noticed one step late


@pytest.mark.parametrize("path", [TEXT, RESPONSES])
def test_stop_strings_of_a_generation_config_stay_in_the_text(server, monkeypatch, path):
    """As `model.generate` returns them; and they are looked for in the batch, too."""
    monkeypatch.delattr(Generation, "_stock_outputs")
    plain = text_of(ask(server, path=TEXT if path == TEXT else CHAT, logit_bias={}, ignore_eos=False))[0]
    stop = plain[2:4]
    config = json.dumps({"max_new_tokens": LENGTH, "stop_strings": [stop]})
    prompt = {"prompt": PROMPT} if path == TEXT else {"input": PROMPT}
    status, said = server.post(path, json.dumps({**prompt, "stream": False, "generation_config": config}).encode())
    assert status == 200
    text = said["choices"][0]["text"] if path == TEXT else said["output"][0]["content"][0]["text"]
    assert stop in text
    if path == TEXT:
        assert text == plain[: len(text)] and said["choices"][0]["finish_reason"] == "stop"


def test_choices_share_the_cache_of_their_prompt(server):
    long = "count from 3 to 7 " * 12
    before = server.engine().stats()
    ask(server, prompt=long, n=8, temperature=1.0, max_tokens=2)
    after = server.engine().stats()
    assert after.prefix_cache_hits - before.prefix_cache_hits >= 7 * 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_log_probabilities_are_those_of_the_model(server, stock, trained_tokenizer, stream):
    """Of every token of the answer, in each endpoint's form; the OpenAI client reads them."""
    ids = trained_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = stock.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)[0]
    with torch.no_grad():
        scores = stock(whole[None]).logits[0].float().log_softmax(-1)
    made = whole[ids.shape[1] :]
    expected = [float(scores[ids.shape[1] - 1 + i, token]) for i, token in enumerate(made)]
    answer = ask(server, stream, logprobs=0, logit_bias={})
    found = [choice["logprobs"] for chunk in answer for choice in chunk["choices"] if "logprobs" in choice]
    joined = {name: [value for part in found for value in part[name]] for name in ("tokens", "token_logprobs",
                                                                                   "text_offset")}
    assert joined["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert joined["tokens"] == [trained_tokenizer.decode([token]) for token in made]
    assert joined["text_offset"][:2] == [0, len(joined["tokens"][0])]
    assert joined["text_offset"][-1] == sum(map(len, joined["tokens"][:-1]))
    said = server.chat([{"role": "user", "content": PROMPT}], logprobs=True, max_tokens=LENGTH, stream=stream)
    parts = list(said) if stream else [said]
    content = [token for part in parts for c in part.choices if c.logprobs for token in c.logprobs.content]
    count = (parts[-1].usage or parts[-2].usage).completion_tokens
    assert len(content) == count > 1
    assert all(token.logprob <= 0 and bytes(token.bytes).decode() == token.token for token in content)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_likeliest_tokens_in_the_place_of_each(server, stock, trained_tokenizer, stream):
    """In each endpoint's form: by their texts with the drawn one, or a list of as many as were asked for."""
    ids = trained_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = stock.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)[0]
    with torch.no_grad():
        scores = stock(whole[None]).logits[0].float().log_softmax(-1)[ids.shape[1] - 1 : -1]
    best = scores.topk(4)
    answer = ask(server, stream, logprobs=4, logit_bias={})
    found = [choice["logprobs"] for chunk in answer for choice in chunk["choices"] if choice.get("logprobs")]
    tops = [top for part in found for top in part["top_logprobs"]]
    assert len(tops) == LENGTH
    for top, values, tokens in zip(tops, best.values, best.indices, strict=True):
        assert list(top.values()) == pytest.approx(values[: len(top)].tolist(), abs=1e-4)
        assert list(top) == list(dict.fromkeys(trained_tokenizer.decode([token]) for token in tokens))
    said = server.chat([{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3, max_tokens=LENGTH,
                           temperature=1.5, seed=3, stream=stream)
    parts = list(said) if stream else [said]
    content = [token for part in parts for c in part.choices if c.logprobs for token in c.logprobs.content]
    assert len(content) > 1
    for token in content:
        known = [other.logprob for other in token.top_logprobs]
        assert len(known) == 3 and known == sorted(known, reverse=True) and token.logprob <= known[0]
        assert all(bytes(other.bytes).decode(errors="replace") for other in token.top_logprobs)


def test_penalties_by_count_are_the_engines(server, trained_tokenizer):
    """As `PagedGenerator` carries them out; each of them changes the answer."""
    ids = trained_tokenizer(PROMPT)["input_ids"]
    engine = server.engine()
    plain = ask(server, max_tokens=24, logit_bias={})[0]["choices"][0]["text"]
    for penalties in ({"presence_penalty": 2}, {"frequency_penalty": 1.5},
                      {"presence_penalty": -1, "frequency_penalty": 2}):
        answer = ask(server, max_tokens=24, logit_bias={}, **penalties)[0]["choices"][0]["text"]
        assert answer != plain
        config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
        request_id = engine.add_request(ids, config, **penalties)
        outputs = run_out(engine)
        [completion] = [o.completion for o in outputs if o.request_id == request_id and o.completion]
        assert answer == trained_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


# -- tools ------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'
TOOL_TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
<|im_start|>assistant{{ '\n' }}"""


@pytest.fixture
def says(server, monkeypatch):
    """The model answers this text, whatever it is asked."""

    def say(text):
        tokens = server.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert server.tokenizer.decode(tokens) == text

        async def outputs(self, *, stream):
            policy = StopPolicy(self.body.stop_texts, keeps_stop=not self.body.stop_texts, skips_special=False)
            pieces, reason = policy.stream(server.tokenizer), "stop" if self.body.stop_texts else "eos"
            for token in tokens if stream else ():
                yield [(0, StepOutput("", [token], pieces.push([token])))]
            whole = policy.text(reason, tokens, server.tokenizer)
            yield [(0, StepOutput("", [], pieces.finish(whole), reason, Completion(tokens, whole, reason, [])))]

        monkeypatch.setattr(Generation, "outputs", outputs)

    monkeypatch.setattr(server.tokenizer, "chat_template", TOOL_TEMPLATE)
    return say


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_calls_are_read_out_of_the_text(server, says, stream):
    says(f"Well. {CALL}")
    answer = ask(server, stream, CHAT, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
    messages = [choice.get("message", choice.get("delta")) for chunk in answer for choice in chunk["choices"]]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "look_up")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"key": "a b"}
    text, reason = text_of(answer)
    assert (text.strip(), reason) == ("Well.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_text_inside_of_a_tool_call_leaves_no_call(server, says, stream):
    says(f"Well. {CALL}")
    answer = ask(server, stream, CHAT, tools=TOOLS, stop=['"arguments"'])
    text, reason = text_of(answer)
    assert text.startswith("Well.") and reason == "stop"
    assert "arguments" not in text


def test_tools_reach_the_chat_template_or_are_refused(server, says):
    """Told to a template that does not look at them, or of a model whose calls nobody can read: 400."""
    says("Well.")
    with_tools, without = (ask(server, path=CHAT, **fields)[0]["usage"]["prompt_tokens"]
                           for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}))
    assert with_tools > without == ask(server, path=CHAT)[0]["usage"]["prompt_tokens"]


def test_tools_of_a_model_whose_calls_nobody_reads_are_refused(trained_tokenizer, monkeypatch):
    monkeypatch.setattr(trained_tokenizer, "chat_template", TOOL_TEMPLATE)
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    served_model = SimpleNamespace(processor=trained_tokenizer, model=model, template_keywords={})
    body = read_body(ChatBody, {"messages": [{"role": "user"}], "tools": TOOLS})
    check_for_model(served_model, body)
    model.config.model_type = "llama"
    with pytest.raises(RefusedRequestError, match="cannot read the calls of this model"):
        check_for_model(served_model, body)

# -- several prompts, and prompts in the answer -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_lists_of_prompts_have_the_choices_of_each(server, stream):
    """Texts and token ids, each with its `n` choices in order; the usage counts each prompt once."""
    prompts = [PROMPT, server.tokenizer("count from 2 to 5")["input_ids"], "count from 1 to 3"]
    alone = [text_of(ask(server, prompt=one)) for one in prompts]
    assert text_of(ask(server, prompt=server.tokenizer(PROMPT)["input_ids"])) == alone[0]
    answer = ask(server, stream, prompt=prompts, n=2)
    pieces, reasons = choices_of(answer)
    assert [("".join(pieces[index]), reasons[index]) for index in range(6)] == [one for one in alone for _ in range(2)]
    lengths = [ask(server, prompt=one)[0]["usage"]["prompt_tokens"] for one in prompts]
    assert answer[-1]["usage"] == {"prompt_tokens": sum(lengths), "completion_tokens": 6 * LENGTH,
                                   "total_tokens": sum(lengths) + 6 * LENGTH}
    sampled = choices_of(ask(server, stream, prompt=[PROMPT] * 3, temperature=2.0, seed=3))[0]
    assert len({"".join(sampled[index]) for index in range(3)}) > 1  # each prompt has seeds of its own


def test_a_prompt_of_a_list_that_cannot_run_ends_the_request(server):
    for prompts, words in (([PROMPT, [896]], "prompt: holds 896, expected token ids in [0, 896)"),
                           ([PROMPT, ""], "none of them empty"), ([[5], "a", 5], "none of them empty"),
                           ([], "prompt=[]: expected a text")):
        status, said = server.post(TEXT, json.dumps({"prompt": prompts}).encode())
        assert status == 400 and words in said["error"]["message"]
    assert server.settles()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_echo_puts_the_prompt_before_the_answer(server, stream):
    plain, reason = text_of(ask(server))
    assert text_of(ask(server, stream, echo=True)) == (PROMPT + plain, reason)
    assert text_of(ask(server, stream, echo=False)) == (plain, reason)


def test_echo_with_log_probabilities_has_those_of_the_prompt(server, stock):
    """As harnesses of evaluations score texts."""
    ids = server.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = stock(ids).logits[0].float().log_softmax(-1)
    expected = [float(scores[place - 1, token]) for place, token in enumerate(ids[0]) if place]
    found = ask(server, echo=True, logprobs=1, max_tokens=1)[0]["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None and len(found["tokens"]) == ids.shape[1] + 1
    assert found["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert found["top_logprobs"][0] is None and len(found["top_logprobs"]) == ids.shape[1] + 1
    assert "".join(found["tokens"]).startswith(PROMPT) and found["text_offset"][1] == len(found["tokens"][0])
    status, said = server.post(TEXT, json.dumps({"prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True}))
    assert status == 400 and said["error"]["message"].startswith("echo=True: expected false in a stream")


def test_a_stream_that_fails_says_so_and_ends(server, monkeypatch):
    """After its first token, in an event with OpenAI's form of errors."""
    outputs = Generation.outputs

    async def failing(self, *, stream):
        async for some in outputs(self, stream=stream):
            yield some
            raise RuntimeError("the roof is on fire")

    monkeypatch.setattr(Generation, "outputs", failing)
    for path, prompt in ((TEXT, {"prompt": PROMPT}), (RESPONSES, {"input": PROMPT})):
        status, said = server.post(path, json.dumps({**prompt, "stream": True}).encode())
        last = events_of(said)[-1]
        assert status == 200 and last["error"]["type"] == "server_error" and "roof" not in said
    assert server.settles()
