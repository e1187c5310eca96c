"""Blocks of experts in models that keep states: by the kernels' references on a CPU, with stock's tokens."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import outlined, recurrent_model, with_idiom
from support import assert_native_parity, batch

import hf_paged
from hf_paged.models import experts, find_executor
from hf_paged.models.experts import ExpertsParts

pytestmark = with_idiom


@pytest.mark.parametrize("name", ["Qwen3_5Moe", pytest.param("Qwen3Next", marks=pytest.mark.slow)])
def test_kernels_give_stocks_tokens(name, monkeypatch):
    """In prompts and in steps of decode rows; with `fused_experts=False` the modules run."""
    rows, products = [], ExpertsParts.products

    def counted(self, hidden, routes):
        rows.append(len(hidden))
        return products(self, hidden, routes)

    monkeypatch.setattr(experts, "why_not_on", lambda device: None)
    monkeypatch.setattr(ExpertsParts, "products", counted)
    model = outlined(recurrent_model(name).to(torch.float16))
    hf_paged.enable(model, strict=True)
    assert find_executor(model)(model).why_not_experts(torch.device("cpu")) is None
    expected = assert_native_parity(model, **batch([30, 17, 9]), max_new_tokens=6)
    assert {3, 29, 16, 8} <= set(rows)  # a prompt's last token is computed with the rows
    rows.clear()
    hf_paged.enable(model, strict=True, fused_experts=False)
    assert torch.equal(assert_native_parity(model, **batch([30, 17, 9]), max_new_tokens=6), expected) and not rows
