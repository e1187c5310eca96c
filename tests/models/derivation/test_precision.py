"""Models of proved classes in other dtypes: after `enable`, under autocast, and with weights of two dtypes."""

from __future__ import annotations

import pytest
import torch
from support import LOGITS, assert_native_parity, assert_near, batch, random_prompts, stock_copy
from tiny_configs import tiny_class_model

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation import deriving
from hf_paged.models.derivation.rows_in_dtype import RowsIn
from hf_paged.models.proof.verdict import Refused

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
INPUTS, OPTIONS = batch([30, 17, 9]), {"max_new_tokens": 5}
# LayerNorm and Conv1D; norms that cast to float32 and back; attention without biases beside experts; latents.
NAMES = ("GPT2LMHeadModel", "Cohere2ForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM")
EACH = pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.startswith("GPT2") else pytest.mark.slow) for name in NAMES])


def autocast(dtype):
    return torch.autocast("cpu", dtype)


def parity(model):
    return assert_native_parity(model, stock_copy(model).generate(**INPUTS, **OPTIONS, **LOGITS), **INPUTS, **OPTIONS)


@EACH
@pytest.mark.parametrize("cast", [BRAIN, HALF])
def test_under_autocast(name, cast):
    """Calls under it and without it take turns."""
    model = hf_paged.enable(tiny_class_model(name, 0), strict=True)
    parity(model)
    with autocast(cast):
        parity(model)
    parity(model)


@EACH
def test_log_probabilities_under_autocast_are_as_far_from_float32s_as_stocks(name):
    model, prompt = tiny_class_model(name, 0), random_prompts([40])[0]
    with PagedGenerator(model, strict=True) as generator, autocast(BRAIN):
        found, = generator.generate([prompt], max_new_tokens=1, prompt_logprobs=True)
    ids = torch.tensor([prompt])

    def of_stock():
        with torch.no_grad():
            known = stock_copy(model)(ids, position_ids=torch.arange(40)[None]).logits[0].float().log_softmax(-1)
        return known[:-1].gather(1, ids[0, 1:, None])[:, 0]

    exact = of_stock()
    with autocast(BRAIN):
        stock = of_stock()
    assert not torch.equal(exact, stock)
    assert_near(torch.tensor(found.prompt_logprobs[1:]), exact, 2 * float((stock - exact).norm() / exact.norm()))


@EACH
def test_a_dtype_that_came_after_enable(name):
    model = hf_paged.enable(tiny_class_model(name, 0), strict=True)
    parity(model)
    parity(model.to(BRAIN))


def with_float32_norms(name):
    """As PEFT's and transformers' own helpers leave norms of a model in lower precision."""
    model = tiny_class_model(name, 0).to(BRAIN)
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower() or "layernorm" in path:
            module.to(FULL)
    return model


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.startswith("GPT2") else pytest.mark.slow) for name in NAMES[:2]])
def test_norms_in_float32(name):
    model = hf_paged.enable(with_float32_norms(name), strict=True)
    parity(model)
    with autocast(BRAIN):
        parity(model)


def test_an_embedding_of_another_dtype_goes_to_stock():
    model = hf_paged.enable(tiny_class_model("GPT2LMHeadModel", 0))
    model.transformer.wpe.to(BRAIN)
    parity(model)  # positions are added to float32
    model.transformer.h[0].mlp.c_fc.to(BRAIN)
    explained = hf_paged.explain(model, **INPUTS)
    assert explained.path == "stock" and "several dtypes" in str(explained)
    assert "`model.to(torch.bfloat16)`" in str(explained)


def test_a_precision_in_which_rows_are_not_shown_to_be_alone_goes_to_stock(tmp_path, monkeypatch):
    def refuse(precision, *args):
        if precision.autocast is not None:
            raise Refused("rows mix")
        return RowsIn(None)

    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(deriving, "check_rows_in", refuse)
    monkeypatch.setattr(deriving, "prove", lambda *args: deriving.Verdict("proved"))
    for _ in range(2):
        model = hf_paged.enable(tiny_class_model("GPT2LMHeadModel", 0), strict=True)
        with autocast(BRAIN):
            explained = hf_paged.explain(model, **INPUTS)
        assert explained.path == "stock"
        assert "autocast to torch.bfloat16, for which GPT2LMHeadModel is not proved: rows mix" in str(explained)
        parity(model)
        monkeypatch.setattr(deriving, "check_rows_in", lambda *args: pytest.fail("made anew"))


def test_an_error_of_a_clone_is_a_reason_and_not_stored(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory")

    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    model = tiny_class_model("GPT2LMHeadModel", 0)
    monkeypatch.setattr(deriving, "prove", lambda *args: deriving.Verdict("proved"))
    with monkeypatch.context() as patched:
        patched.setattr(deriving, "check_rows_in", fail)
        assert "does not run (RuntimeError: no memory)" in str(hf_paged.explain(hf_paged.enable(model), **INPUTS))
    parity(hf_paged.enable(stock_copy(model), strict=True))
