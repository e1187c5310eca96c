"""Packages that put modules or forwards of their own into a model to edit activations: stock, which names them."""

from __future__ import annotations

import pytest
import torch
from support import assert_falls_back, assert_native_parity, batch, byte_tokenizer, tiny_model

import hf_paged

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


@pytest.fixture
def repeng(monkeypatch):
    np = pytest.importorskip("numpy")
    monkeypatch.setattr(np, "float_", np.float64, raising=False)  # which repeng reads and numpy 2 has no more
    return pytest.importorskip("repeng")


def test_repengs_control_modules(repeng):
    model, plain = tiny_model(), tiny_model().generate(**INPUTS, **OPTIONS)
    control = repeng.ControlModel(model, [0, 1])
    reason = r"model\.layers\.0 is a repeng\.control\.ControlModule, not transformers' own Qwen3DecoderLayer"
    assert torch.equal(assert_falls_back(model, reason, **INPUTS, **OPTIONS), plain)
    directions = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    control.set_raw_control(dict(enumerate(directions)))
    controlled = assert_falls_back(model, reason, **INPUTS, **OPTIONS)
    assert not torch.equal(controlled, plain)
    hf_paged.enable(control.unwrap(), strict=True)
    assert_native_parity(model, plain, **INPUTS, **OPTIONS)


def test_nnsights_wrapper():
    """Its forwards stay on the modules after a trace."""
    nnsight = pytest.importorskip("nnsight")
    model, ids = tiny_model(), INPUTS["input_ids"][:1]
    plain = model.generate(ids, **OPTIONS)
    wrapper = nnsight.LanguageModel(model, tokenizer=byte_tokenizer())
    reason = r"forward is replaced on the instance by nnsight\.\S+, a wrapper that hf_paged does not know"
    assert torch.equal(assert_falls_back(model, reason, input_ids=ids, **OPTIONS), plain)

    def edited():
        with wrapper.generate(ids, **OPTIONS) as tracer:
            wrapper.model.layers[0].output[:] = 0
            tokens = tracer.result.save()
        return tokens

    expected = edited()
    assert not torch.equal(expected, plain)
    hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match=reason):
        assert torch.equal(edited(), expected)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 0
