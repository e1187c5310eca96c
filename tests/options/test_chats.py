"""Messages of chats: contents in parts, and what is wrong with a message."""

from __future__ import annotations

import asyncio
import copy
import json
import re

import pytest
from support import byte_tokenizer, tiny_model

from hf_paged import PagedGenerator
from hf_paged.options.prompts import MEDIA, is_chat, prompt_ids, readable_chat

JOINED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '|' }}{% endfor %}"
WRITTEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"  # a list as Python writes it
AS_JSON = ("{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}|"
           "{% endfor %}")
LISTS = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c['text'] }};{% endfor %}{% endfor %}"
BOTH = ("{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ c.text if c.type == 'text' else c.thinking }};{% endfor %}{% endif %}{% endfor %}")
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


# Templates that render parts in ways of their own: no model has all, each is some model's.
EACH = "{% for m in messages %}<{{ m.role }}>"
END = "{% endfor %}"
READ = "{% for p in m.content %}{{ p.text | default('') }};{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + READ + "{% endif %}"
ROLES = ("system", "developer", "user", "assistant", "tool", "model")
STOCK = {
    "both": BOTH,
    "either": EACH + EITHER + END,
    "upper": EACH + EITHER.replace("m.content }}", "m.content | upper }}").replace("p.text", "p.text | upper") + END,
    "words like a part's": "Answer as {'type': 'text'}, {\"type\": \"function\"}, [] or [{'type': 'text', "
                           "'text': 'one'}, {'type': 'text', 'text': 'two'}].\n" + EACH + EITHER + END,
    "keys of its own": EACH + "{% for p in m.content if p is mapping %}{{ p.lang }}{{ p.type }}{{ p.text }};"
                              "{% endfor %}" + END,
    "one part": EACH + "{% if m.content is string or m.content | length != 1 %}{{ raise_exception('one part') }}"
                       "{% endif %}{{ m.content[0].source }}{{ m.content[0].text }}" + END,
    "system first": "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + BOTH,
    "strings": EACH + "{{ m.content if m.content is string else m.content | join('|') }}" + END,
    "number of parts": EACH + "{{ m.content | length }}" + END,
    "assistant alone": EACH + "{% if m.role == 'assistant' %}" + EITHER + "{% else %}{{ 'u' + m.content }}{% endif %}"
                       + END,
    "roles alone": EACH + END,
    "tools as JSON": EACH + "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ 'u' + m.content }}"
                            "{% endif %}" + END,
    "others as JSON": EACH + "{% if m.role in ('tool', 'model') %}{{ m.content | tojson }}{% else %}" + EITHER
                      + "{% endif %}" + END,
    "reads": LISTS, "joined": JOINED, "written": WRITTEN, "as JSON": AS_JSON,
}
CONTENTS = [
    "text", TEXTS, [TEXTS[0]], [TEXTS[0], {"type": "text", "text": "two"}], [{"text": "a"}], ["a", "b"], [],
    [{"type": "text", "text": "a", "lang": "de", "source": "cs"}], [{"type": "thinking", "thinking": "hm"}, TEXTS[0]],
    [{"type": "text", "text": "it's\n\"é\" & <b> \\n [{'type': 'text', 'text': 'one'}]"}], [{"temp": 3, "on": None}],
    "what does [{'type': 'text', 'text': 'one'}, {'type': 'input_text', 'text': 'two'}] mean?", (TEXTS[0],),
]


def chats():
    for role in ROLES:
        for content in CONTENTS:
            yield [{"role": role, "content": content}]
            yield [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                   {"role": role, "content": content}]
            yield [{"role": "user", "content": CONTENTS[-2]}, {"role": role, "content": content},
                   {"role": "assistant", "content": [TEXTS[0]]}]


def is_written(chat, rendered):
    """Does stock write a list of parts of a role whose contents are text?"""
    lists = [list(m["content"]) for m in chat if m["role"] in ROLES[:4] and not isinstance(m["content"], str)]
    return any(form in rendered for parts in lists for form in (repr(parts), json.dumps(parts, ensure_ascii=False)))


@pytest.mark.parametrize("name", STOCK)
def test_what_stock_renders_is_rendered_as_stock_does(name):
    """Of every role and kind of part: the prompts are stock's, but where stock raises or writes a list down."""
    tokenizer, same = tokenizer_with(STOCK[name]), 0
    for chat in chats():
        before = copy.deepcopy(chat)
        try:
            stock = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:
            continue
        if is_written(chat, stock) and name != "words like a part's":
            continue
        assert prompt_ids(chat, tokenizer, {}) == tokenizer.apply_chat_template(chat)["input_ids"], chat
        assert chat == before
        same += 1
    assert same >= 12


@pytest.mark.parametrize(("template", "expected"), [
    (JOINED, "<system>s|<user>one two|"), (WRITTEN, "<system>s|<user>one two|"), (AS_JSON, "<system>s|<user>one two|"),
    (WRITTEN.replace("m.content", "m.content | upper"), "<system>S|<user>ONE TWO|"),
    (WRITTEN.replace("m.content", "m.content | e"), "<system>s|<user>one two|"),
    (WRITTEN.replace("m.content", "m.content | string | trim"), "<system>s|<user>one two|"),
    (AS_JSON.replace("tojson", "tojson(indent=2)"), "<system>s|<user>one two|"),
])
def test_text_parts_are_joined_where_stock_raises_or_writes_the_list(template, expected):
    tokenizer = tokenizer_with(template)
    assert tokenizer.apply_chat_template(readable_chat(CHAT, tokenizer, {}), tokenize=False) == expected
    assert CHAT[1]["content"] is TEXTS and TEXTS[1]["type"] == "input_text"  # the caller's, left alone


@pytest.mark.parametrize(("name", "chat", "expected"), [
    ("assistant alone", [{"role": "user", "content": TEXTS}, {"role": "assistant", "content": TEXTS}],
     "<user>uone two<assistant>one;two;"),
    ("assistant alone", [{"role": "user", "content": TEXTS}, {"role": "assistant", "content": [{"type": "x"}]}],
     "<user>uone two<assistant>;"),
    ("tools as JSON", [{"role": "user", "content": TEXTS}, {"role": "tool", "content": [{"temp": 3}]}],
     '<user>uone two<tool>[{"temp": 3}]'),
    ("joined", [{"role": "user", "content": "q"}, {"role": "tool", "content": TEXTS}], "<user>q|<tool>one two|"),
])
def test_parts_are_joined_in_no_more_roles_than_need_it(name, chat, expected):
    tokenizer = tokenizer_with(STOCK[name])
    assert tokenizer.apply_chat_template(readable_chat(chat, tokenizer, {}), tokenize=False) == expected


def test_a_message_that_quotes_a_list_is_not_taken_for_the_list():
    tokenizer = tokenizer_with(BOTH)
    chat = [{"role": "user", "content": str(TEXTS)}, {"role": "user", "content": TEXTS}]
    assert readable_chat(chat, tokenizer, {}) == chat
    assert readable_chat(chat, tokenizer_with(WRITTEN), {})[1]["content"] == "one two"


def test_what_neither_way_renders_is_answered_with_both_reasons():
    chat = [{"role": "user", "content": [TEXTS[0], {"type": "thinking", "thinking": "hm"}]}]
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[1\]: a part of type 'thinking', expected text "
                                         r".*; with the parts as given, the chat template fails: can only concatenate"):
        readable_chat(chat, tokenizer_with(JOINED), {})
    with pytest.raises(ValueError, match=r"fails: it writes the list that messages\[0\]\['content'\] is"):
        readable_chat(chat, tokenizer_with(WRITTEN), {})
    with pytest.raises(Exception, match=r"^never$"):
        prompt_ids(CHAT, tokenizer_with("{{ raise_exception('never') }}"), {})
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
@pytest.mark.parametrize("kind", MEDIA)
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
