"""`return_dict_in_generate=True` alone is native: stock's output, whose cache is computed once somebody looks."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from family_models import VARIANTS, family_model
from support import assert_close_steps, assert_same_tensor, batch, stock_copy, tiny_model
from threads import run_threads
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_paged
from hf_paged.integration import caches
from hf_paged.integration.caches import CACHE_NAME, LateCache

shared_model = functools.cache(tiny_model)
INPUTS = batch([20, 13, 5])
EOS = 83  # what stock makes of the first row as fourth token
CALL = {**INPUTS, "max_new_tokens": 12, "eos_token_id": EOS, "return_dict_in_generate": True}


@pytest.fixture
def model(native_only):
    yield hf_paged.enable(shared_model(), strict=True)
    hf_paged.disable(shared_model())
    shared_model().eval()


def assert_same_cache(actual, expected):
    assert actual.get_seq_length() == expected.get_seq_length()
    assert len(actual) == len(expected)
    for ours, stocks in zip(actual, expected, strict=True):
        assert_close_steps(ours[:2], stocks[:2])
    assert type(actual) is DynamicCache


@pytest.mark.parametrize("kwargs", [{}, {"eos_token_id": None}, {"max_new_tokens": 1}, {"attention_mask": None},
                                    {"do_sample": True, "top_k": 1, "num_return_sequences": 3}],
                         ids=["ragged", "no end", "one token", "inferred mask", "several sequences"])
def test_output_and_cache_are_stocks(model, kwargs):
    kwargs = {name: value for name, value in (CALL | kwargs).items() if value is not None}
    expected, actual = stock_copy(model).generate(**kwargs), model.generate(**kwargs)
    assert type(actual) is GenerateDecoderOnlyOutput
    assert list(actual.keys()) == list(expected.keys()) == ["sequences", CACHE_NAME]
    assert_same_tensor(actual.sequences, expected.sequences)
    assert (actual.scores, actual.logits, actual.attentions, actual.hidden_states) == (None,) * 4
    assert type(actual.past_key_values) is LateCache, "computed before anybody looked"
    actual.sequences.fill_(3)  # the result is its caller's
    assert_same_cache(actual.past_key_values, expected.past_key_values)


def test_a_long_batch_is_computed_piece_by_piece(model, monkeypatch):
    monkeypatch.setattr(caches, "TOKENS_AT_ONCE", 12)
    assert_same_cache(model.generate(**CALL).past_key_values, stock_copy(model).generate(**CALL).past_key_values)


@pytest.mark.parametrize("family", VARIANTS)
def test_caches_of_every_family(family, native_only):
    model = family_model(family)
    kwargs = {**INPUTS, "max_new_tokens": 9, "return_dict_in_generate": True}
    expected = model.generate(**kwargs)
    actual = hf_paged.enable(model, strict=True).generate(**kwargs)
    assert_same_tensor(actual.sequences, expected.sequences)
    assert [type(layer) for layer in actual.past_key_values.layers] == [
        type(layer) for layer in expected.past_key_values.layers]
    assert_same_cache(actual.past_key_values, expected.past_key_values)


def test_generation_goes_on_from_the_cache(model):
    """As multi-turn programs do: the whole conversation, and the cache of its beginning."""
    results = []
    for run in (stock := stock_copy(model), model):
        first = run.generate(**CALL | {"eos_token_id": None})
        longer = torch.cat([first.sequences, torch.tensor([[7, 8]] * 3)], dim=1)
        mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 14, dtype=torch.int64)], dim=1)
        goes_on = {"attention_mask": mask, "past_key_values": first.past_key_values, "max_new_tokens": 6}
        results.append(stock.generate(longer, **goes_on))
    assert_same_tensor(*results)


USES = {
    "layers": lambda cache: cache.layers[0].keys, "length": lambda cache: cache.get_seq_length(),
    "iteration": list, "len": len, "truth": bool, "reorder": lambda cache: cache.reorder_cache(torch.arange(3)),
    "crop": lambda cache: cache.crop(-2), "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "repr": repr, "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps,
    "update": lambda cache: cache.update(torch.ones(3, 2, 1, 16), torch.ones(3, 2, 1, 16), 0),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_makes_an_ordinary_cache(model, use):
    cache = model.generate(**CALL).past_key_values
    assert isinstance(cache, DynamicCache)
    USES[use](cache)
    assert type(cache) is DynamicCache
    assert set(vars(cache)) == set(vars(DynamicCache()))


def test_looks_at_names_that_no_cache_has_compute_nothing(model):
    output = model.generate(**CALL)
    assert not hasattr(output.past_key_values, "to")
    assert not hasattr(output.past_key_values, "__dataclass_fields__")
    assert output.to_tuple() == (output.sequences, output.past_key_values)
    assert copy.copy(output).past_key_values is output.past_key_values
    assert type(output[CACHE_NAME]) is LateCache


def test_copies_and_pickles_of_the_output(model):
    expected = stock_copy(model).generate(**CALL)
    for through in (copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))):
        made = through(model.generate(**CALL))
        assert type(made) is GenerateDecoderOnlyOutput
        assert_same_tensor(made.sequences, expected.sequences)
        assert_same_cache(made.past_key_values, expected.past_key_values)


def test_threads_that_look_at_once_get_one_cache(model):
    cache = model.generate(**CALL).past_key_values
    seen, start = [], threading.Barrier(4)

    def look():
        start.wait()
        seen.append(cache.layers)

    threads = [threading.Thread(target=look) for _ in range(4)]
    run_threads(threads)
    assert len(seen) == 4 and all(layers is seen[0] for layers in seen)


def test_after_disable_and_under_another_autocast(model):
    expected, output = stock_copy(model).generate(**CALL), model.generate(**CALL)
    hf_paged.disable(model)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert_same_cache(output.past_key_values, expected.past_key_values)
    output.past_key_values.layers[0].keys.add_(1)  # no tensor of inference mode


def test_without_a_prefix_cache(native_only):
    model = hf_paged.enable(tiny_model(), enable_prefix_caching=False)
    assert_same_cache(model.generate(**CALL).past_key_values, stock_copy(model).generate(**CALL).past_key_values)


CHANGES = {
    "weights": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01),
    "dropout": lambda model: setattr(model.train().model.layers[0].self_attn, "attention_dropout", 0.5),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_computes_something_else_by_now_is_not_asked(native_only, change, caching):
    model = hf_paged.enable(tiny_model(), enable_prefix_caching=caching)
    output = model.generate(**CALL)
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match="cache of a result: expected the model to be as it was"):
        len(output.past_key_values)


def test_the_output_keeps_neither_model_nor_engine_alive(native_only):
    model = hf_paged.enable(tiny_model())
    alive = [weakref.ref(model), weakref.ref(hf_paged.get_engine(model))]
    output = model.generate(**CALL)
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    with pytest.raises(RuntimeError, match="expected the model of the call to be alive"):
        len(output.past_key_values)


def test_nothing_is_computed_for_a_caller_who_does_not_look(model, monkeypatch):
    forwards = []
    monkeypatch.setattr(caches._Call, "compute", lambda self: forwards.append(self))
    for _ in range(3):
        assert model.generate(**CALL)[CACHE_NAME] is not None
    assert not forwards


@pytest.mark.parametrize("option", ["output_scores", "output_logits"])
def test_scores_without_a_dict_ask_for_nothing(model, option):
    kwargs = {**INPUTS, "max_new_tokens": 5, option: True}
    assert_same_tensor(model.generate(**kwargs), stock_copy(model).generate(**kwargs))
