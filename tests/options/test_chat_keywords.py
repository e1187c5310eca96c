"""A keyword of chats that the template does not read is refused, whichever entry it comes in by."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from support import byte_tokenizer, tiny_model
from transformers import PreTrainedTokenizerBase

from hf_paged import PagedGenerator
from hf_paged.options.chat_keywords import OURS, check_read
from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.prompts import check_for_model
from hf_paged.server.protocol import ChatBody

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}]
UNREAD = {
    "tools": TOOLS, "documents": [{"title": "t", "text": "x"}], "enable_thinking": False, "reasoning_effort": "low",
    "add_generation_prompt": False, "any_other": 1,
}


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), tokenizer_with(PLAIN), num_blocks=40) as generator:
        yield generator


def agenerate(generator, **keywords):
    return asyncio.run(generator.agenerate([CHAT], max_new_tokens=2, **keywords))


def astream(generator, **keywords):
    async def run():
        return [item async for item in generator.astream([CHAT], max_new_tokens=2, **keywords)]

    return asyncio.run(run())


def serve(generator, **keywords):
    """The server's own look at a body, once model and tokenizer are known."""
    own = {name: keywords.pop(name) for name in ("tools", "reasoning_effort") if name in keywords}
    body = ChatBody.model_construct(messages=CHAT, chat_template_kwargs=keywords, **own)
    tokenizer = generator.tokenizer
    served = SimpleNamespace(processor=tokenizer, tokenizer=tokenizer, model=generator.model, template_keywords={})
    check_for_model(served, body)


ENTRIES = {
    "generate": lambda generator, **keywords: generator.generate([CHAT], max_new_tokens=2, **keywords),
    "complete": lambda generator, **keywords: generator.generate([CHAT, "a"], max_new_tokens=2, on_error="complete",
                                                                 **keywords),
    "chat_template_kwargs": lambda generator, **keywords: generator.generate([CHAT], max_new_tokens=2,
                                                                             chat_template_kwargs=keywords),
    "stream": lambda generator, **keywords: list(generator.stream([CHAT], max_new_tokens=2, **keywords)),
    "agenerate": agenerate,
    "astream": astream,
    "server": serve,
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_the_template_does_not_read_is_refused_by_name(generator, entry, name):
    with pytest.raises(ValueError, match=f"{name}=.*chat template"):
        ENTRIES[entry](generator, **{name: UNREAD[name]})
    assert not generator.engine.has_unfinished()


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("entry", sorted(ENTRIES.keys() - {"server"}))
def test_what_the_template_of_the_call_reads_is_not(generator, entry, name):
    ENTRIES[entry](generator, chat_template=f"{PLAIN}{{{{ {name} }}}}", **{name: UNREAD[name]})


@pytest.mark.parametrize("keywords", [{"tools": None}, {"tools": []}, {"documents": None}, {"documents": []},
                                      {"enable_thinking": None}, {"any_other": None},
                                      {"add_generation_prompt": True}, {"chat_template": PLAIN},
                                      {"add_generation_prompt": False, "continue_final_message": True}])
def test_what_asks_for_nothing_is_not(generator, keywords):
    [made] = generator.generate([CHAT], max_new_tokens=2, chat_template_kwargs=keywords)
    [plain] = generator.generate([CHAT], max_new_tokens=2)
    assert made.prompt_token_ids[:5] == plain.prompt_token_ids[:5]


@pytest.mark.parametrize("name", ["tools", "documents", "enable_thinking"])
@pytest.mark.parametrize("entry", sorted(ENTRIES.keys() - {"server", "chat_template_kwargs"}))
def test_none_is_as_if_left_out(generator, entry, name):
    ENTRIES[entry](generator, **{name: None})
    template = f"{PLAIN}{{{{ {name} | default('unset') }}}}"
    given, left_out = (generator.generate([CHAT], max_new_tokens=2, chat_template=template, **keywords)[0]
                       for keywords in ({name: None}, {}))
    assert given.prompt_token_ids == left_out.prompt_token_ids
    generator.generate([[3, 4]], max_new_tokens=2, **{name: None})  # no chat, and nothing for its template


def test_none_for_a_name_that_is_unknown_is_refused(generator):
    with pytest.raises(ValueError, match="temprature=None: expected temperature"):
        generator.generate([CHAT], max_new_tokens=2, temprature=None)


def test_the_template_is_the_one_that_will_be_used():
    """Of several named ones: the one for tools where there are tools, else the default or the named one."""
    named = {"default": PLAIN, "tool_use": f"{PLAIN}{{{{ tools }}}}", "rag": f"{PLAIN}{{{{ documents }}}}"}
    tokenizer = tokenizer_with(named)
    check_read({"tools": TOOLS}, tokenizer)
    check_read({"documents": [{}], "chat_template": "rag"}, tokenizer)
    for keywords in ({"tools": TOOLS, "chat_template": "rag"}, {"documents": [{}]},
                     {"tools": TOOLS, "documents": [{}]}):
        with pytest.raises(ValueError, match="does not refer to it"):
            check_read(keywords, tokenizer)


def test_every_parameter_of_transformers_is_read_by_it_or_by_the_template():
    """A new parameter of `apply_chat_template` that only reaches the template is noticed here."""
    source = inspect.getsource(PreTrainedTokenizerBase.apply_chat_template)
    handed_on = source.partition("render_jinja_template(")[2].partition(")\n")[0]
    refused = set()
    for name in set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}:
        try:
            check_read({name: UNREAD.get(name, 1)}, tokenizer_with(PLAIN))
        except ValueError:
            refused.add(name)
    assert refused == {"conversation", "tools", "documents", "add_generation_prompt"}
    assert all(f"{name}={name}" in handed_on for name in refused - {"conversation"}) and not refused & {*OURS}


def test_a_tokenizer_with_a_method_of_its_own_reads_its_parameters():
    class Own(PreTrainedTokenizerBase):
        def apply_chat_template(self, conversation, tools=None, **kwargs):
            return {"input_ids": [3]}

    tokenizer = Own()
    tokenizer.chat_template = PLAIN
    check_read({"tools": TOOLS}, tokenizer)
    with pytest.raises(ValueError, match="documents="):
        check_read({"documents": [{}]}, tokenizer)
    check_read({"anything": 1}, SimpleNamespace())  # whose template cannot be read


def test_without_a_template_the_tokenizer_says_so(generator, monkeypatch):
    reader = type(generator._reader)(_without_template(generator.engine), generator.model)
    monkeypatch.setattr(generator, "_reader", reader)
    with pytest.raises(ValueError, match=r"prompts\[0\]: .*chat_template is not set"):
        generator.generate([CHAT], tools=TOOLS, max_new_tokens=2)


def _without_template(engine):
    class Engine:
        tokenizer = byte_tokenizer()

        def __getattr__(self, name):
            return getattr(engine, name)

    return Engine()


def test_a_refusal_of_the_server_names_the_field(generator):
    with pytest.raises(RefusedRequestError, match=r"^chat_template_kwargs: any_other=1: "):
        serve(generator, any_other=1)
    with pytest.raises(RefusedRequestError, match=r"^tools="):
        serve(generator, tools=TOOLS)
