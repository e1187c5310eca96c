"""Images of the server's requests: stock's answers, beside text, and what is refused."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from image_models import IMAGE
from image_processors import MARKS, data_url, image, model_of, pil, processor, stock_answer
from PIL import ImageFile
from recurrent_models import with_idiom
from serve_bodies import CHAT, RESPONSES
from serve_support import events_of, served
from support import num_calls
from transformers import AutoProcessor
from transformers.cli.serving import utils

import hf_paged
from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.images import ImageLimits, ImageReader
from hf_paged.server.served_model import load_model

LENGTH = 8
TEXT = [{"role": "user", "content": "hello"}]
LIMITS = ImageLimits(images=3, image_bytes=40_000, image_pixels=8_000)


def chat(*parts: Any) -> list[dict[str, Any]]:
    """Return a chat as clients send it: texts, and images as data URLs."""
    return [{"role": "user", "content": [
        {"type": "text", "text": part} if isinstance(part, str) else {
            "type": "image_url", "image_url": {"url": data_url(part)}} for part in parts]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    made = processor("llava")
    model_of(made, "llava").save_pretrained(path)
    made.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server(folder):
    with served(folder, image_limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def stock():
    made = processor("llava")
    model = model_of(made, "llava")

    def answer(messages, **settings):
        prompt, tokens = stock_answer(model, made, messages, max_new_tokens=LENGTH, **settings)
        text = made.decode(tokens, skip_special_tokens=True)
        return text, {"prompt_tokens": len(prompt), "completion_tokens": len(tokens),
                      "total_tokens": len(prompt) + len(tokens)}

    return answer


def ask(server, messages, status=200, path=CHAT, **fields):
    named = {"messages": messages, "max_tokens": LENGTH} if path == CHAT else {
        "input": messages, "max_output_tokens": LENGTH}
    found, answer = server.post(path, json.dumps({**named, "temperature": 0, **fields}))
    assert found == status, answer
    return answer


def text_of(answer) -> str:
    return answer["choices"][0]["message"]["content"]


ONE, TWO = chat("what is ", image(1), "?"), chat(image(1), " or ", image(2, 16, 24), "?")


def test_answers_are_stocks(server, stock):
    before = num_calls(server.model)
    for messages in (ONE, TEXT, TWO, chat("what is ", image(3), "?"), ONE):
        text, usage = stock(messages)
        answer = ask(server, messages)
        assert (text_of(answer), answer["usage"]) == (text, usage)
    assert stock(ONE)[0] != stock(chat("what is ", image(3), "?"))[0]
    counts = server.engine().stats()
    assert num_calls(server.model) == before  # none by `model.generate`
    assert counts.prefix_cache_hits > 0 and server.settles()


@with_idiom
def test_answers_of_a_model_with_states_are_stocks(tmp_path, monkeypatch):
    made = processor("qwen3.5")
    model = model_of(made, "qwen3.5")
    model.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **options: made)  # its own reads videos, too
    monkeypatch.setattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS", {})  # of chats with Qwen's own marks
    with served(str(tmp_path), image_limits=LIMITS) as server:
        for messages in (ONE, TEXT, TWO, chat("what is ", image(3), "?"), ONE):
            _, tokens = stock_answer(model, made, messages, max_new_tokens=LENGTH)
            assert text_of(ask(server, messages)) == made.decode(tokens, skip_special_tokens=True)
        stats = server.engine().stats()
        assert num_calls(server.model) == {} and stats.prefix_cache_hits > 0 and stats.num_images_encoded > 0


def test_streams_and_choices(server, stock):
    text, usage = stock(TWO)
    status, said = server.post(CHAT, json.dumps({
        "messages": TWO, "max_tokens": LENGTH, "temperature": 0, "stream": True, "n": 3,
        "stream_options": {"include_usage": True}}))
    assert status == 200
    texts = ["", "", ""]
    for event in events_of(said):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [text] * 3
    assert events_of(said)[-1]["usage"] == {
        "prompt_tokens": usage["prompt_tokens"], "completion_tokens": 3 * LENGTH,
        "total_tokens": usage["prompt_tokens"] + 3 * LENGTH}
    whole = ask(server, TWO, n=2)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [text] * 2


def test_the_responses_api(server, stock):
    part = {"type": "input_image", "image_url": data_url(image(1)), "detail": "auto"}
    given = [{"role": "user", "content": [{"type": "input_text", "text": "what is "}, part,
                                          {"type": "input_text", "text": "?"}]}]
    answer = ask(server, given, path=RESPONSES)
    assert answer["output"][-1]["content"][0]["text"] == stock(ONE)[0]
    assert answer["usage"]["input_tokens"] == stock(ONE)[1]["prompt_tokens"]


def test_two_turns_and_many_clients(server, stock):
    first = text_of(ask(server, ONE))
    second = [*ONE, {"role": "assistant", "content": [{"type": "text", "text": first}]}, *chat("and ", image(3), "?")]
    all_of_them = [second, TEXT, TWO, ONE, chat("x", image(5)), TEXT]
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda messages: ask(server, messages), all_of_them))
    assert [(text_of(one), one["usage"]) for one in answers] == [stock(messages) for messages in all_of_them]
    assert server.settles()


def test_a_client_that_leaves(server, stock):
    body = json.dumps({"messages": TWO, "max_tokens": 400, "stream": True, "temperature": 0})
    connection = server.send(CHAT, body)
    connection.getresponse().readline()
    connection.close()
    assert text_of(ask(server, ONE)) == stock(ONE)[0]
    assert server.settles()


def url_part(url: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **more}}]}]


def file_of(picture) -> bytes:
    return base64.b64decode(data_url(picture).partition(",")[2])


HOSTILE: dict[str, tuple[Any, str]] = {
    "http": (url_part("http://169.254.169.254/latest/meta-data"), "fetches no URLs"),
    "https": (url_part("https://example.org/cat.png"), "fetches no URLs"),
    "file": (url_part("file:///etc/passwd"), "reads no files"),
    "path": (url_part("/etc/passwd"), "reads no files"),
    "ftp": (url_part("ftp://localhost/x"), "fetches no URLs"),
    "base64 alone": (url_part(base64.b64encode(file_of(image(1))).decode()), "expected a data URL"),
    "no text": (url_part(5), "expected a data URL"),
    "null": (url_part(None), "expected a data URL"),
    "no url": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages: expected"),
    "a file of the client's": ([{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}], "messages: "),
    "detail": (url_part(data_url(image(1)), detail="high"), "detail='high' of an image, expected 'auto'"),
    "truncated": (url_part(data_url(file_of(image(1, 64, 64))[:2000])), "truncated"),
    "no image": (url_part(data_url(b"hello")), "cannot identify"),
    "no base64": (url_part("data:image/png;base64,????"), "expected a data URL"),
    "empty": (url_part("data:image/png;base64,"), "cannot identify"),
    "another format": (url_part(data_url(image(1), "TIFF")), "cannot identify"),
    "postscript": (url_part(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), "cannot identify"),
    "pixels": (url_part(data_url(pil.new("1", (9_000, 9_000)))), "81,000,000 or more pixels in its images, expected"),
    "pixels together": (chat(image(1, 70, 70), image(2, 70, 70)), "pixels in its images, expected at most 8,000"),
    "bytes": (url_part(data_url(b"x" * 50_000)), "bytes in its images, expected at most 40,000"),
    "images": (chat(*[image(1)] * 4), "4 or more images, expected at most 3"),
    "placeholder": (chat(f"a {MARKS[IMAGE]} ", image(1)), "messages, tools, chat_template_kwargs: expected"),
    "a video": ([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}],
                "type='video_url', expected what this model reads: image_url, input_image, "),
    "thin": (chat(image(1, 1, 201)), "an image of 1 x 201 pixels, expected at most 200 times as many on one side"),
    "in a text": ([{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "http://x/y"}}]}],
                  "messages: image_url in a part of type='text', expected a part of its own"),
    "too long": (chat("x" * 600, image(1)), "max_model_len"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_refused(server, stock, kind, stream):
    """With 400, a short reason, and no harm to a request beside it."""
    messages, reason = HOSTILE[kind]
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(ask, server, ONE)
        answer = ask(server, messages, 400, stream=stream)
        assert reason in answer["error"]["message"] and len(answer["error"]["message"]) <= 1000
        assert text_of(other.result()) == stock(ONE)[0]


@pytest.mark.parametrize(("options", "expected"), [
    ({"size": {"shortest_edge": 20_000}}, "at most the processor's own"),
    ({"size": {"height": 8, "width": 8}}, "at most the processor's own"),
    ({"size": 20_000}, "at most the processor's own"),
    ({"crop_size": {"height": 17, "width": 16}}, "at most the processor's own"),
    ({"pad_size": {"height": 20_000, "width": 20_000}}, "it left out"),
    ({"device": "cuda"}, "it left out"),
    ({"pad_to_multiple_of": 10**9}, "it left out"),
], ids=repr)
def test_options_with_which_an_image_would_be_larger(server, stock, options, expected):
    """A client's options are within the processor's own settings, as images are within limits."""
    answer = ask(server, ONE, 400, chat_template_kwargs=options)
    name = next(iter(options))
    assert f"chat_template_kwargs: {name}=" in answer["error"]["message"]
    assert f"expected {expected}" in answer["error"]["message"]
    assert text_of(ask(server, ONE)) == stock(ONE)[0]


def test_options_within_the_processors_own(server, stock):
    options = {"crop_size": {"height": 16, "width": 16}, "image_mean": [0.9, 0.1, 0.4], "rescale_factor": 0.01}
    expected = stock(ONE, template=options)[0]
    assert text_of(ask(server, ONE, chat_template_kwargs=options)) == expected != stock(ONE)[0]


def test_what_the_models_own_code_refuses(server, monkeypatch):
    """The request is at fault, and the others go on."""
    monkeypatch.setattr(server.served.processor, "num_additional_image_tokens", 0)  # 15 placeholders for 16 vectors
    assert "messages: expected images that the model takes" in ask(server, chat("?", image(7)), 400)["error"]["message"]
    assert text_of(ask(server, TEXT))


def test_images_that_the_engine_does_not_run(server, stock, monkeypatch):
    """They run by `model.generate`, as other requests that the engine does not run."""
    reason = hf_paged.errors.Reason("a test wants stock", remedy="Leave it out.")
    monkeypatch.setattr(type(server.engine()), "images_reason", lambda self, adapter=None: reason)
    assert text_of(ask(server, TWO)) == stock(TWO)[0]


def test_a_template_that_the_tokenizer_has(tmp_path):
    made = processor("llava")
    template, made.chat_template = made.chat_template, None
    made.tokenizer.chat_template = template
    model_of(made, "llava").save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    made.tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    assert load_model(str(tmp_path), device="cpu")[1].chat_template == template


def test_a_server_without_images(folder, stock):
    with served(folder, image_limits=ImageLimits(images=0)) as server:
        answer = ask(server, ONE, 400)
        assert "a part of type='image_url', expected what this model reads: input_text" in answer["error"]["message"]
        assert text_of(ask(server, TEXT)) == stock(TEXT)[0]


def test_headers_are_read_before_pixels(monkeypatch):
    """A file over the limit is never decoded."""
    url, loaded = data_url(image(1)), []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: loaded.append(self.size))
    reader = ImageReader(ImageLimits(image_pixels=300))
    reader.read(url)
    with pytest.raises(RefusedRequestError, match="512 or more pixels"):
        reader.read(url)
    assert loaded == [(16, 16)]


def test_formats_that_are_read():
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        assert ImageReader(ImageLimits()).read(data_url(image(1), kind)).size == (16, 16)
    lines = data_url(image(1)).replace("iVBOR", "iVB\nOR ")
    assert ImageReader(ImageLimits()).read(lines).tobytes() == image(1).tobytes()
