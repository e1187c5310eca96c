"""Messages as the templates and processors of models read them."""

from __future__ import annotations

import pytest
from image_processors import data_url, image

from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.images import ImageLimits, ImageReader
from hf_paged.server.prompts import _message as message_of

IMAGES = frozenset({"image"})


def _message(message, modalities):
    return message_of(message, modalities, ImageReader(ImageLimits()))


def test_a_message_for_a_model_of_texts_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert _message({"role": "user", "content": parts}, frozenset()) == {"role": "user", "content": "a b"}
    assert _message({"role": "user"}, frozenset()) == {"role": "user", "content": ""}
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio", "input_audio": "x"}):
        with pytest.raises(RefusedRequestError, match="expected what this model reads: input_text, output_text, text"):
            _message({"role": "user", "content": [part]}, frozenset())


def test_parts_of_other_modalities_are_named_as_processors_name_them():
    urls = [data_url(image(number)) for number in range(3)]
    parts = [{"type": "image_url", "image_url": {"url": urls[0], "detail": "auto"}},
             {"type": "input_image", "image_url": urls[1], "detail": "auto"},
             {"type": "image_url", "image_url": urls[2]}, {"type": "text", "text": "a"}]
    *pictures, text = _message({"role": "user", "content": parts}, IMAGES)["content"]
    assert [picture["image"].tobytes() for picture in pictures] == [image(number).tobytes() for number in range(3)]
    assert {picture["type"] for picture in pictures} == {"image"} and text == {"type": "text", "text": "a"}
    audio = {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}
    assert _message({"role": "user", "content": [audio]}, frozenset({"audio"}))["content"] == [
        {"type": "audio", "url": "data:audio/wav;base64,QQ=="}]
    for part in (audio, {"type": "video_url", "video_url": {"url": "z"}}):
        with pytest.raises(RefusedRequestError, match=f"a part of type='{part['type']}', expected what this model "):
            _message({"role": "user", "content": [part]}, IMAGES)


@pytest.mark.parametrize("url", ["http://localhost/x.wav", "file:///etc/passwd", "/etc/passwd", "QQ==", 5])
def test_nothing_is_fetched_for_audio(url):
    part = {"type": "audio_url", "audio_url": {"url": url}}
    with pytest.raises(RefusedRequestError, match="as audio, expected a data URL"):
        _message({"role": "user", "content": [part]}, frozenset({"audio"}))
    data = {"type": "input_audio", "input_audio": {"data": url}}
    made = _message({"role": "user", "content": [data]}, frozenset({"audio"}))["content"]
    assert made == [{"type": "audio", "url": f"data:audio/wav;base64,{url}"}]


def test_calls_of_tools_have_their_arguments_as_objects():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    made = _message({"role": "assistant", "content": "<call>", "tool_calls": [call], "reasoning_content": "hm"},
                    frozenset())
    assert made["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'  # the body stays
    assert (made["content"], made["reasoning_content"]) == ("", "hm")
    assert _message({"role": "tool", "tool_call_id": "1", "content": "2"}, frozenset())["tool_call_id"] == "1"
