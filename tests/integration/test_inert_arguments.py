"""Arguments of generate that change no token: native, with stock's tokens; and `use_cache=False`."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from support import assert_lockstep, assert_native_parity, assert_same_tensor, batch, stock_copy, tiny_model
from transformers import LogitsProcessor
from transformers.utils import TransformersKwargs

import hf_paged
from hf_paged.integration.caches import CACHE_NAME
from hf_paged.integration.recognise.inputs import INERT_ARGUMENTS, NEUTRAL_ARGUMENTS, argument_reasons, has_images

INPUTS = batch([20, 13, 5])
# Every value that is tried must leave stock's own tokens alone, and reach it at all.
VALUES = {
    "labels": [torch.ones(3, 20, dtype=torch.int64), torch.full((3, 7), -100), "not even a tensor"],
    "num_items_in_batch": [7, torch.tensor(7)],
    "tokenizer": ["anything"],
    "assistant_tokenizer": [],  # generate takes it with an assistant only
    "use_cache": [True, False],
    "output_attentions": [False],
    "output_hidden_states": [False],
    "output_router_logits": [False],
}
READ_BY_THE_ENGINE = ("self", "kwargs", "input_ids", "attention_mask", "position_ids", CACHE_NAME,
                      "logits_to_keep")


def arguments():
    """Every argument that some supported model's forward takes, or transformers allows any."""
    found = {*TransformersKwargs.__optional_keys__}
    accepted = json.loads((Path(__file__).parents[1] / "models" / "proof" / "verdicts.json").read_text())
    proved = (name for name, verdict in accepted["classes"].items() if verdict["outcome"] == "proved")
    for name in filter(partial(hasattr, transformers), proved):  # an older transformers has fewer classes
        found |= set(inspect.signature(getattr(transformers, name).forward).parameters)
    return sorted(found - set(READ_BY_THE_ENGINE))


@pytest.mark.parametrize("name", arguments())
def test_every_argument_of_a_forward_is_inert_for_a_reason_or_of_images_or_left_to_stock(name):
    if has_images({name: torch.ones(2, 3)}) or name in INERT_ARGUMENTS:
        assert next(argument_reasons({name: object()}), None) is None
    else:
        for value, described in ((object(), "a object"), (torch.ones(2, 3), "Tensor float32")):
            reason = next(argument_reasons({name: value}))
            assert reason == f"model argument {name}={described}"
    assert next(argument_reasons({name: None}), None) is None and not has_images({name: None})


def test_the_values_tried_are_those_of_the_tables():
    assert set(VALUES) == {*INERT_ARGUMENTS, *NEUTRAL_ARGUMENTS}
    assert {name: tuple(VALUES[name]) for name in NEUTRAL_ARGUMENTS} == NEUTRAL_ARGUMENTS


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in VALUES for value in VALUES[name]],
                         ids=lambda value: value if isinstance(value, str) else type(value).__name__)
@pytest.mark.parametrize("in_lockstep", [False, True])
def test_with_the_argument_stocks_tokens_come_natively(name, value, in_lockstep, request):
    model = tiny_model()
    if in_lockstep:
        request.getfixturevalue("lockstep_only")
    plain = model.generate(**INPUTS, max_new_tokens=8)
    kwargs = {**INPUTS, "max_new_tokens": 8, name: value}
    assert_same_tensor(stock_copy(model).generate(**kwargs), plain)
    assert_native_parity(hf_paged.enable(model, strict=True), plain, **kwargs)


def test_an_argument_that_no_forward_has_raises_as_in_stock():
    with pytest.raises(ValueError, match="lables"):
        hf_paged.enable(tiny_model()).generate(**INPUTS, lables=torch.ones(3, 20), max_new_tokens=4)


# -- use_cache=False ------------------------------------------


@pytest.mark.parametrize("where", ["keyword", "generation_config", "config of the model"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_without_a_cache_stocks_tokens_come_natively(native_only, where, as_dict):
    model = tiny_model()
    kwargs = {**INPUTS, "max_new_tokens": 10, "eos_token_id": 9}
    if where == "keyword":
        kwargs["use_cache"] = False
    elif where == "generation_config":
        model.generation_config.use_cache = False
    else:  # as OnlineDPO sets it
        model.config.use_cache = False
    kwargs |= {"return_dict_in_generate": True} if as_dict else {}
    expected = model.generate(**kwargs)
    actual = hf_paged.enable(model, strict=True).generate(**kwargs)
    if as_dict:
        assert type(actual) is type(expected)
        assert list(actual.keys()) == list(expected.keys())
        actual, expected = actual.sequences, expected.sequences
    assert_same_tensor(actual, expected)


class AddToOneToken(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 9] += 100.0 * (input_ids.shape[1] % 2)
        return scores


@pytest.mark.parametrize("kwargs", [
    {"logits_processor": [AddToOneToken()]},
    {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    {"num_beams": 3}, {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True},
    {"do_sample": True, "top_h": 0.5}, {"guidance_scale": 2.0},
], ids=["processor", "scores", "beams", "beams in a dict", "sampling", "guidance"])
def test_without_a_cache_in_lockstep(kwargs):
    kwargs = {**INPUTS, "max_new_tokens": 8, "use_cache": False} | kwargs
    output = assert_lockstep(tiny_model(), **kwargs)
    assert isinstance(output, torch.Tensor) or output.past_key_values is None


@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_lookup_without_a_cache_raises_as_in_stock():
    kwargs = {**batch([20]), "max_new_tokens": 8, "use_cache": False, "prompt_lookup_num_tokens": 3}
    model = tiny_model()
    with pytest.raises((ValueError, RuntimeError)) as stock:
        model.generate(**kwargs)
    hf_paged.enable(model)
    with pytest.raises(stock.type, match=str(stock.value)[:20]):
        model.generate(**kwargs)
