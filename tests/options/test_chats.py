"""Messages of chats: contents in parts, and what is wrong with a message."""

from __future__ import annotations

import asyncio
import re

import pytest
from support import byte_tokenizer, tiny_model

from hf_paged import PagedGenerator
from hf_paged.options.chat_templates import reads_parts
from hf_paged.options.chats import _MEDIA, is_chat, readable_chat

JOINED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '|' }}{% endfor %}"
WRITTEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"  # a list as Python writes it
AS_JSON = ("{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}|"
           "{% endfor %}")
LISTS = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c['text'] }};{% endfor %}{% endfor %}"
BOTH = ("{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ c.text if c.type == 'text' else c.thinking }};{% endfor %}{% endif %}{% endfor %}")
STRICT = "{{ bos_token + eos_token }}" + BOTH
TEXTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": TEXTS}]


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), tokenizer_with(JOINED), num_blocks=40) as generator:
        yield generator


@pytest.mark.parametrize(("template", "takes"), [
    (JOINED, False), (WRITTEN, False), (AS_JSON, False), (LISTS, True), (BOTH, True), (STRICT, True),
    ("{{ raise_exception('never') }}", False), ("{{ messages[0].role }}", False),
])
def test_which_templates_take_parts(template, takes):
    assert reads_parts(template) is takes


@pytest.mark.parametrize(("template", "expected"), [
    (JOINED, "<system>s|<user>one two|"), (WRITTEN, "<system>s|<user>one two|"), (AS_JSON, "<system>s|<user>one two|"),
    (BOTH, "<system>s<user>one;two;"),
])
def test_text_parts_are_rendered_as_the_template_reads_them(template, expected):
    tokenizer = tokenizer_with(template)
    assert tokenizer.apply_chat_template(readable_chat(CHAT, tokenizer, {}), tokenize=False) == expected
    assert CHAT[1]["content"] is TEXTS and TEXTS[1]["type"] == "input_text"  # the caller's, left alone


def test_parts_that_a_template_takes_give_what_stock_gives():
    chat = [{"role": "user", "content": [TEXTS[0], {"type": "thinking", "thinking": "hm"}]}]
    tokenizer = tokenizer_with(BOTH)
    assert readable_chat(chat, tokenizer, {}) == chat
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[1\]: a part of type 'thinking', expected text"):
        readable_chat(chat, tokenizer_with(JOINED), {})
    other = readable_chat(CHAT, tokenizer_with(JOINED), {"chat_template": BOTH})
    assert isinstance(other[1]["content"], list)  # the template of the call decides


def test_parts_in_every_call(generator):
    expected = generator.tokenizer("<system>s|<user>one two|")["input_ids"]
    prompts = [CHAT, [{"role": "user", "content": "x"}]]

    async def awaited():
        return await generator.agenerate(prompts, max_new_tokens=2)

    streamed = dict(item for item in generator.stream(prompts, max_new_tokens=2) if item[1].completion is not None)
    for made in (generator.generate(prompts, max_new_tokens=2), generator.generate(CHAT, max_new_tokens=2),
                 asyncio.run(awaited()), [streamed[0].completion]):
        assert made[0].prompt_token_ids == expected


@pytest.mark.parametrize("template", [JOINED, BOTH])
@pytest.mark.parametrize("kind", _MEDIA)
def test_what_is_no_text_is_refused_by_name(template, kind):
    tokenizer = tokenizer_with(template)
    for part in ({"type": kind, kind: "x"}, {kind: {"url": "x"}}, {"type": "text", "text": "t", kind: "x"}):
        with pytest.raises(ValueError, match=rf"messages\[1\]\['content'\]\[2\]: a part of type '{kind}', expected"):
            readable_chat([CHAT[0], {"role": "user", "content": [*TEXTS, part]}], tokenizer, {})


@pytest.mark.parametrize("part", ["a", 3, {"type": "text"}, {"type": "text", "text": 3},
                                  {"type": "text", "text": None}])
def test_parts_that_are_none(generator, part):
    with pytest.raises(TypeError, match=r"prompts\[0\]: messages\[0\]\['content'\]\[0\]=.*expected text parts"):
        generator.generate([{"role": "user", "content": [part]}], max_new_tokens=2)


@pytest.mark.parametrize(("prompts", "where"), [
    ([{"content": "a"}], "messages[0]={'content': 'a'}"),
    ([*CHAT, {"content": "a"}], "messages[2]={'content': 'a'}"),
    ([*CHAT, {"role": None, "content": "a"}], "messages[2]={'role': None"),
    ([*CHAT, {"text": "a"}], "messages[2]={'text': 'a'}"),
    ([[{"content": "a"}]], "messages[0]={'content': 'a'}"),
])
def test_a_message_without_a_role_is_named(generator, prompts, where):
    for call in (generator.generate, generator.stream):
        with pytest.raises(ValueError, match=rf"^prompts\[0\]: {re.escape(where)}.*expected a role"):
            call(prompts, max_new_tokens=2)
    [made] = generator.generate([[{"content": "a"}]], max_new_tokens=2, on_error="complete")
    assert made.finish_reason == "error" and "expected a role" in made.error


@pytest.mark.parametrize(("value", "expected"), [
    (CHAT, True), ([{"content": "a"}], True), (CHAT[0], False), ([], False), ([{"prompt": "a"}], False),
    ([{"prompt": "a"}, {"content": "a"}], False), ([CHAT], False), (["a"], False), ([3], False), ([{}], False),
])
def test_what_is_meant_as_a_chat(value, expected):
    assert is_chat(value) is expected


def test_one_message_by_itself_is_named(generator):
    for message in ({"role": "user", "content": "a"}, {"content": "a"}):
        with pytest.raises(TypeError, match="this is one message; expected a chat, which is a list of messages"):
            generator.generate(message, max_new_tokens=2)
