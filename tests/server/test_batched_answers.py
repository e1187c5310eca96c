"""Answers whose tokens the batch makes: stop texts that end them there, log-probabilities and tool calls."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from serve_answers import LENGTH, PROMPT, TOOLS, ask, text_of
from serve_bodies import CHAT, RESPONSES, TEXT
from serve_support import served
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_paged.integration.continuous_batching.requests import ServedOutput
from hf_paged.server import templates
from hf_paged.server.calls import RefusedRequestError
from hf_paged.server.requests import ServedRequests
from hf_paged.server.server_request import ServerRequest


@pytest.fixture(scope="module")
def continuous(trained_path):
    with served(trained_path, True) as server:
        yield server


@pytest.fixture(scope="module")
def stock(trained_path):
    return AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32).eval()


def test_a_request_with_a_stop_text_runs_in_the_batch_and_ends_there(continuous, monkeypatch):
    """Together with others that have none, or their own; the engine makes no tokens after it."""
    monkeypatch.delattr(ServedRequests, "_run_alone")
    plain = text_of(ask(continuous))[0]
    stops = [None, plain[2:4], [plain[3:5], "x"], plain[-2:], "never"]
    before = continuous.engine().stats().num_generated_tokens
    with ThreadPoolExecutor(len(stops)) as pool:
        answers = list(pool.map(lambda stop: ask(continuous, stop=stop)[0], stops))
    made = continuous.engine().stats().num_generated_tokens - before
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [plain, *(plain[: plain.index(stop)] for stop in (plain[2:4], plain[3:5], plain[-2:])), plain]
    lengths = [answer["usage"]["completion_tokens"] for answer in answers]
    assert lengths[0] == lengths[4] == LENGTH > lengths[1]
    assert sum(lengths) <= made <= sum(lengths) + len(stops)  # a stop is noticed one step late


@pytest.mark.parametrize("path", [TEXT, RESPONSES])
def test_stop_strings_of_a_generation_config_stay_in_the_text(continuous, monkeypatch, path):
    """As `model.generate` returns them; and they are looked for in the batch, too."""
    monkeypatch.delattr(ServedRequests, "_run_alone")
    plain = text_of(ask(continuous, path=TEXT if path == TEXT else CHAT, logit_bias={}, ignore_eos=False))[0]
    stop = plain[2:4]
    config = json.dumps({"max_new_tokens": LENGTH, "stop_strings": [stop]})
    prompt = {"prompt": PROMPT} if path == TEXT else {"input": PROMPT}
    status, said = continuous.post(path, json.dumps({**prompt, "stream": False, "generation_config": config}).encode())
    assert status == 200
    text = said["choices"][0]["text"] if path == TEXT else said["output"][0]["content"][0]["text"]
    assert stop in text
    if path == TEXT:
        assert text == plain[: len(text)] and said["choices"][0]["finish_reason"] == "stop"


def test_choices_share_the_cache_of_their_prompt(continuous):
    long = "count from 3 to 7 " * 12
    before = continuous.engine().stats()
    ask(continuous, prompt=long, n=8, temperature=1.0, max_tokens=2)
    after = continuous.engine().stats()
    assert after.prefix_cache_hits - before.prefix_cache_hits >= 7 * 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_log_probabilities_are_those_of_the_model(continuous, stock, trained_tokenizer, stream):
    """Of every token of the answer, in each endpoint's form; the OpenAI client reads them."""
    ids = trained_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = stock.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)[0]
    with torch.no_grad():
        scores = stock(whole[None]).logits[0].float().log_softmax(-1)
    made = whole[ids.shape[1] :]
    expected = [float(scores[ids.shape[1] - 1 + i, token]) for i, token in enumerate(made)]
    answer = ask(continuous, stream, logprobs=0, logit_bias={})
    found = [choice["logprobs"] for chunk in answer for choice in chunk["choices"] if "logprobs" in choice]
    joined = {name: [value for part in found for value in part[name]] for name in ("tokens", "token_logprobs",
                                                                                   "text_offset")}
    assert joined["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert joined["tokens"] == [trained_tokenizer.decode([token]) for token in made]
    assert joined["text_offset"][:2] == [0, len(joined["tokens"][0])]
    assert joined["text_offset"][-1] == sum(map(len, joined["tokens"][:-1]))
    said = continuous.chat([{"role": "user", "content": PROMPT}], logprobs=True, max_tokens=LENGTH, stream=stream)
    parts = list(said) if stream else [said]
    content = [token for part in parts for c in part.choices if c.logprobs for token in c.logprobs.content]
    count = (parts[-1].usage or parts[-2].usage).completion_tokens
    assert len(content) == count > 1
    assert all(token.logprob <= 0 and bytes(token.bytes).decode() == token.token for token in content)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_likeliest_tokens_in_the_place_of_each(continuous, stock, trained_tokenizer, stream):
    """In each endpoint's form: by their texts with the drawn one, or a list of as many as were asked for."""
    ids = trained_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = stock.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)[0]
    with torch.no_grad():
        scores = stock(whole[None]).logits[0].float().log_softmax(-1)[ids.shape[1] - 1 : -1]
    best = scores.topk(4)
    answer = ask(continuous, stream, logprobs=4, logit_bias={})
    found = [choice["logprobs"] for chunk in answer for choice in chunk["choices"] if choice.get("logprobs")]
    tops = [top for part in found for top in part["top_logprobs"]]
    assert len(tops) == LENGTH
    for top, values, tokens in zip(tops, best.values, best.indices, strict=True):
        assert list(top.values()) == pytest.approx(values[: len(top)].tolist(), abs=1e-4)
        assert list(top) == list(dict.fromkeys(trained_tokenizer.decode([token]) for token in tokens))
    said = continuous.chat([{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3, max_tokens=LENGTH,
                           temperature=1.5, seed=3, stream=stream)
    parts = list(said) if stream else [said]
    content = [token for part in parts for c in part.choices if c.logprobs for token in c.logprobs.content]
    assert len(content) > 1
    for token in content:
        known = [other.logprob for other in token.top_logprobs]
        assert len(known) == 3 and known == sorted(known, reverse=True) and token.logprob <= known[0]
        assert all(bytes(other.bytes).decode(errors="replace") for other in token.top_logprobs)


def test_penalties_by_count_are_the_engines(continuous, trained_tokenizer):
    """As `PagedGenerator` carries them out; each of them changes the answer."""
    ids = trained_tokenizer(PROMPT)["input_ids"]
    engine = continuous.engine()
    plain = ask(continuous, max_tokens=24, logit_bias={})[0]["choices"][0]["text"]
    for penalties in ({"presence_penalty": 2}, {"frequency_penalty": 1.5},
                      {"presence_penalty": -1, "frequency_penalty": 2}):
        answer = ask(continuous, max_tokens=24, logit_bias={}, **penalties)[0]["choices"][0]["text"]
        assert answer != plain
        config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
        request_id = engine.add_request(ids, config, **penalties)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        [completion] = [o.completion for o in outputs if o.request_id == request_id and o.completion]
        assert answer == trained_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


# -- tools ------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
<|im_start|>assistant{{ '\n' }}"""


@pytest.fixture
def says(continuous, monkeypatch, trained_tokenizer):
    """The model answers this text, whatever it is asked."""

    def say(text):
        tokens = trained_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert trained_tokenizer.decode(tokens) == text

        def register(self, request_id, callback):
            def outputs():
                for end in range(1, len(tokens) + 1):
                    status = RequestStatus.FINISHED if end == len(tokens) else RequestStatus.DECODING
                    callback(ServedOutput(request_id, generated_tokens=tokens[:end], status=status,
                                          finish_reason="eos" if end == len(tokens) else None))
                self.call.begin()

            self._loop.call_soon(outputs)

        monkeypatch.setattr(ServedRequests, "add_request", lambda self, ids, request_id, **kwargs: request_id)
        monkeypatch.setattr(ServedRequests, "register_result_handler", register)

    tokenizer = next(iter(continuous._serve._model_manager.loaded_models.values())).processor
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return say


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_calls_are_read_out_of_the_text(continuous, says, stream):
    says(f"Well. {CALL}")
    answer = ask(continuous, stream, CHAT, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
    messages = [choice.get("message", choice.get("delta")) for chunk in answer for choice in chunk["choices"]]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "look_up")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"key": "a b"}
    text, reason = text_of(answer)
    assert (text.strip(), reason) == ("Well.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_text_inside_of_a_tool_call_leaves_no_call(continuous, says, stream):
    says(f"Well. {CALL}")
    answer = ask(continuous, stream, CHAT, tools=TOOLS, stop=['"arguments"'])
    text, reason = text_of(answer)
    assert text.startswith("Well.") and reason == "stop"
    assert "arguments" not in text


def test_tools_reach_the_chat_template_or_are_refused(continuous, says):
    """Told to a template that does not look at them, or of a model whose calls nobody can read: 400."""
    says("Well.")
    with_tools, without = (ask(continuous, path=CHAT, **fields)[0]["usage"]["prompt_tokens"]
                           for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}))
    assert with_tools > without == ask(continuous, path=CHAT)[0]["usage"]["prompt_tokens"]


def test_tools_of_a_model_whose_calls_nobody_reads_are_refused(trained_tokenizer, monkeypatch):
    monkeypatch.setattr(trained_tokenizer, "chat_template", TEMPLATE)
    text = SimpleNamespace(vocab_size=len(trained_tokenizer))
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3", get_text_config=lambda: text))
    templates.check_for_model(ServerRequest(tools=TOOLS), trained_tokenizer, model)
    model.config.model_type = "llama"
    with pytest.raises(RefusedRequestError, match="cannot read the calls of this model"):
        templates.check_for_model(ServerRequest(tools=TOOLS), trained_tokenizer, model)
