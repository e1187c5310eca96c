"""The keywords of requests: what type checkers, `help` and the calls themselves know of them is the same."""

from __future__ import annotations

import inspect
import re

import pytest
from support import tiny_model

from hf_paged import Engine, PagedGenerator
from hf_paged.options import keywords, table
from hf_paged.options.request_spec import PLAIN

ENTRIES = [(PagedGenerator.generate, keywords.CallKeywords), (PagedGenerator.stream, keywords.StreamKeywords),
           (Engine.add_request, keywords.EngineKeywords)]


@pytest.mark.parametrize(("entry", "kind"), ENTRIES, ids=["generate", "stream", "add_request"])
def test_an_entry_shows_every_keyword_with_its_default(entry, kind):
    shown = inspect.signature(entry).parameters
    for name in keywords.names_of(kind):
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].default == keywords.DEFAULTS.get(name)
        assert "ForwardRef" not in str(shown[name].annotation)


@pytest.mark.parametrize(("entry", "kind"), [ENTRIES[0], ENTRIES[2]], ids=["generate", "add_request"])
def test_the_documentation_of_an_entry_has_every_keyword_once(entry, kind):
    items = re.findall(r"^    (\S[^:]*): ", inspect.getdoc(entry).partition("Args:")[2], re.MULTILINE)
    named = [name for item in items for name in item.split(", ")]
    assert sorted(name for name in named if name in keywords.names_of(kind)) == sorted(keywords.names_of(kind))


def test_every_option_of_a_request_is_a_keyword_of_it():
    assert set(PLAIN) <= set(keywords.names_of(keywords.RequestKeywords))


def test_type_checkers_know_every_native_option_of_a_config():
    assert set(table.names(table.NATIVE)) <= set(keywords.names_of(keywords.GenerateKeywords))


def test_an_unknown_keyword_is_named_with_those_that_there_are():
    with PagedGenerator(tiny_model(), num_blocks=8) as generator:
        with pytest.raises(TypeError, match="'timeouts': expected one of seed, logprobs,"):
            generator.engine.add_request([3, 4], timeouts=3)
        for call in (generator.generate, generator.stream):
            with pytest.raises(ValueError, match="timeouts=3: expected timeout"):
                call([[3, 4]], timeouts=3)
        assert not generator.engine.has_unfinished()
