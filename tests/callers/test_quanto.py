"""optimum-quanto: weight-only layers are called as they stand, those that round activations go to stock."""

from __future__ import annotations

import pytest
import torch
from support import assert_falls_back, assert_native_beside_others, assert_native_parity, batch, tiny_model
from transformers import AutoModelForCausalLM, QuantoConfig

import hf_paged

quanto = pytest.importorskip("optimum.quanto")

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
SLOW = pytest.mark.slow  # the first use in an environment compiles quanto's extension, which takes minutes


def _quantized(weights, activations=None, seed=0, freeze=True):
    model = tiny_model(seed)
    quanto.quantize(model, weights=weights, activations=activations)
    if freeze:
        quanto.freeze(model)
    return model


@pytest.mark.parametrize("weights", [
    "qint8", "qfloat8", pytest.param("qint4", marks=SLOW), pytest.param("qint2", marks=SLOW),
])
def test_weight_only_is_native(weights):
    model = _quantized(getattr(quanto, weights))
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, quanto.QTensor)
    assert_native_beside_others(model)


def test_weights_that_are_not_frozen_yet():
    """They are floats, rounded anew in every forward."""
    assert_native_beside_others(_quantized(quanto.qint8, freeze=False), long_tokens=30)


def test_rounded_activations_go_to_stock():
    model = _quantized(quanto.qint8, quanto.qint8)
    reason = r"q_proj is a optimum\.quanto\.nn\.qlinear\.QLinear, which hands on rounded activations"
    assert_falls_back(model, reason, **INPUTS, **OPTIONS)


@pytest.mark.parametrize("weights", ["int8", "float8"])
def test_a_checkpoint_quantized_by_transformers(weights, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QuantoConfig(weights=weights))
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "QLinear"
    assert_native_beside_others(model)


@pytest.mark.parametrize("what", ["bytes", "scales", "inner tensor", "parameter"])
def test_a_changed_weight_is_noticed(what):
    model = _quantized(quanto.qint8)
    first = model.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, first, **INPUTS, **OPTIONS)
    module = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        if what == "bytes":
            module.weight._data.neg_()
        elif what == "scales":
            module.weight._scale.data.mul_(-1)
        elif what == "inner tensor":
            module.weight._data = -module.weight._data
        else:
            module.weight = _quantized(quanto.qint8, seed=7).model.layers[0].mlp.up_proj.weight
    hf_paged.disable(model)
    changed = model.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0
