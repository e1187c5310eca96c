"""Verdicts are stored under keys of what they depend on, and a damaged or missing one is made again."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.models.proof import Verdict, prove, store
from hf_paged.models.proof.clone import on_meta
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.proof.prove import _keys
from hf_paged.models.proof.reduced import reduced
from tests.models.proof.planted import Change, planted, small_llama

PROVED = Verdict("proved", "", 131_070, 8_200, 2.5)


def keys(cls=transformers.LlamaForCausalLM, attention="sdpa", **overrides):
    config = small_llama(**overrides)
    small = reduced(config)
    return _keys(on_meta(cls, small), config, small, attention)


def test_a_verdict_is_plain_json():
    assert Verdict.from_json(json.loads(json.dumps(PROVED.to_json()))) == PROVED


@pytest.mark.parametrize("change", [
    {"outcome": "certain"}, {"reason": None}, {"max_length": "all"}, {"max_step_tokens": True}, {"more": 1},
    {"whole_prompts": None},
])
def test_other_json_is_no_verdict(change):
    assert Verdict.from_json(PROVED.to_json() | change) is None


@pytest.mark.parametrize("other", [
    {"attention": "eager"}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"max_position_embeddings": 1024},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"unread": 777},
    {"num_key_value_heads": 4}, {"cls": transformers.MistralForCausalLM},
], ids=str)
def test_what_a_verdict_depends_on_makes_another_key(other):
    assert not set(keys()) & set(keys(**other))


@pytest.mark.parametrize("module", [transformers, torch], ids=lambda module: module.__name__)
def test_a_version_makes_another_key(module, monkeypatch):
    before = keys()
    monkeypatch.setattr(module, "__version__", "9.9.9")
    assert not set(before) & set(keys())


def test_source_makes_another_key(tmp_path):
    """A class of the same name, in a file with one more comment."""
    file = tmp_path / "modeling.py"
    file.write_text("x = 1")
    before = store.key_of(transformers.LlamaForCausalLM, small_llama(), "sdpa", frozenset({str(file)}))
    file.write_text("x = 2")
    assert store.key_of(transformers.LlamaForCausalLM, small_llama(), "sdpa", frozenset({str(file)})) != before
    model = on_meta(planted(Change("none", "proved"), tmp_path), small_llama())
    assert any(name.startswith(str(tmp_path)) for name in modeling_files(model.modules()))


def test_sizes_alone_make_no_other_key_of_clones():
    large = keys(hidden_size=4096, intermediate_size=9999, num_hidden_layers=40, num_attention_heads=32,
                 num_key_value_heads=8, head_dim=128, vocab_size=100_000)
    assert large[0] != keys()[0] and large[1] == keys(num_hidden_layers=4)[1]


def test_patched_code_has_no_key(monkeypatch):
    llama = transformers.models.llama.modeling_llama
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: x)
    assert keys() == (None, None)


def test_a_stored_verdict_is_returned_and_other_sizes_share_the_clone(stored_here):
    first = prove(transformers.LlamaForCausalLM, small_llama(num_hidden_layers=4))
    assert first.outcome == "proved" and len(list(stored_here.glob("*.json"))) == 2
    for file in stored_here.glob("*.json"):
        store.write(file.stem, PROVED)
    assert prove(transformers.LlamaForCausalLM, small_llama(num_hidden_layers=4)) == PROVED
    larger = prove(transformers.LlamaForCausalLM, small_llama(num_hidden_layers=5, hidden_size=128))
    assert larger.max_length == PROVED.max_length
    assert len(list(stored_here.iterdir())) == 3  # no locks are left


def test_a_damaged_file_is_made_again(stored_here):
    stored_here.mkdir(parents=True)
    for text in ("", "{", "[]", '{"outcome": "proved"}'):
        (stored_here / "key.json").write_text(text)
        assert store.get_or_make("key", lambda: PROVED) == PROVED == store.read("key")


def test_a_folder_that_cannot_be_made_costs_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "file"))
    assert store.get_or_make("key", lambda: PROVED) == PROVED


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_PAGED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "hf_paged" / "proofs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "hf_paged" / "proofs"


def test_one_of_two_that_come_at_once_makes_the_verdict():
    made, begun, go_on = [], threading.Event(), threading.Event()

    def make():
        begun.set()
        assert go_on.wait(60)
        made.append(1)
        return PROVED

    first = threading.Thread(target=store.get_or_make, args=("key", make))
    second = threading.Thread(target=store.get_or_make, args=("key", make))
    first.start()
    assert begun.wait(60)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert made == [1]


def test_a_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(store, "LONGEST_WAIT_S", 0.0)
    with store.turn("key"):
        assert store.get_or_make("key", lambda: PROVED) == PROVED




def test_a_file_that_somebody_edited_is_made_again(stored_here):
    store.write("edited", Verdict("proved", max_length=16))
    file = stored_here / "edited.json"
    file.write_text(file.read_text().replace("16", "32"))
    assert store.read("edited") is None


def test_a_user_without_a_home_directory_has_no_store(monkeypatch):
    def fail(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HF_PAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(store.Path, "expanduser", fail)
    assert store.get_or_make("key", lambda: Verdict("open", "some code did not run")).outcome == "open"


@pytest.mark.parametrize("registry", [ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS])
def test_an_attention_of_the_users_own_has_no_key(registry, monkeypatch):
    """What it computes would be taken for stock's in other processes."""
    assert None not in keys()
    stock = registry["sdpa"]
    monkeypatch.setitem(registry._global_mapping, "sdpa", lambda *args, **kwargs: stock(*args, **kwargs))
    assert keys() == (None, None)
