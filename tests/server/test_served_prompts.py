"""Messages as the templates and processors of models read them."""

from __future__ import annotations

import pytest

from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.prompts import _message

IMAGES = frozenset({"image", "video"})


def test_a_message_for_a_model_of_texts_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert _message({"role": "user", "content": parts}, frozenset()) == {"role": "user", "content": "a b"}
    assert _message({"role": "user"}, frozenset()) == {"role": "user", "content": ""}
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio", "input_audio": "x"}):
        with pytest.raises(RefusedRequestError, match="expected what this model reads: input_text, output_text, text"):
            _message({"role": "user", "content": [part]}, frozenset())


def test_parts_of_other_modalities_are_named_as_processors_name_them():
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image", "image_url": "y"},
             {"type": "video_url", "video_url": {"url": "z"}}, {"type": "text", "text": "a"}]
    assert _message({"role": "user", "content": parts}, IMAGES)["content"] == [
        {"type": "image", "url": "x"}, {"type": "image", "url": "y"}, {"type": "video", "url": "z"},
        {"type": "text", "text": "a"}]
    audio = {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}
    assert _message({"role": "user", "content": [audio]}, frozenset({"audio"}))["content"] == [
        {"type": "audio", "url": "data:audio/wav;base64,QQ=="}]
    with pytest.raises(RefusedRequestError, match="input_audio"):
        _message({"role": "user", "content": [audio]}, IMAGES)


def test_calls_of_tools_have_their_arguments_as_objects():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    made = _message({"role": "assistant", "content": "<call>", "tool_calls": [call], "reasoning_content": "hm"},
                    frozenset())
    assert made["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'  # the body stays
    assert (made["content"], made["reasoning_content"]) == ("", "hm")
    assert _message({"role": "tool", "tool_call_id": "1", "content": "2"}, frozenset())["tool_call_id"] == "1"
