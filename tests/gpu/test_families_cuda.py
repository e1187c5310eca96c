"""On a GPU: every family gives stock's tokens in fp32, with graphs and without, and as good ones in bf16."""

from __future__ import annotations

import pytest
import torch
from family_models import VARIANTS, family_model
from support import assert_native_parity, batch, stock_copy, stock_generate

import hf_paged

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128}
FAMILIES = sorted(VARIANTS)
# Experts are run one by one here and longrope asks for the longest position: neither can be captured.
EXPERTS = ("qwen3-moe", "gpt-oss", "mixtral")
CAPTURED = [name for name in FAMILIES if not name.startswith((*EXPERTS, "phi3-longrope"))]
# bf16 turns the choice of experts: stock's own logits move by two deviations between bf16 and fp32 (H200, 2026-11-21).
STEADY = [name for name in FAMILIES if name != "gpt-oss"]


def on_gpu(variant, dtype):
    overrides = dict(SHAPE)
    if variant.startswith("phi3"):  # its head_dim is hidden_size / heads
        overrides = {**SHAPE, "hidden_size": 256}
    if variant == "phi3-longrope":
        rope = VARIANTS[variant].settings["rope_parameters"]
        factors = {name: [1.0 + i / 8 for i in range(16)] for name in ("short_factor", "long_factor")}
        overrides["rope_parameters"] = {**rope, **factors}
    return family_model(variant, **overrides).to("cuda", dtype)


def cuda(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("variant", FAMILIES)
def test_fp32_equals_stock(variant, enforce_eager):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = hf_paged.enable(on_gpu(variant, torch.float32), strict=True, enforce_eager=enforce_eager)
    inputs = cuda(batch([1, 16, 33, 70, 40, 3]))
    expected = stock_generate(model, **inputs, max_new_tokens=24)
    for _ in range(2):
        assert_native_parity(model, expected, **inputs, max_new_tokens=24)
    if variant in CAPTURED:
        assert (hf_paged.get_engine(model).stats().num_graphs_captured > 0) is not enforce_eager


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("variant", STEADY)
def test_bf16_tokens_are_among_stocks_best(variant, enforce_eager):
    """Rounding may turn a choice between two close tokens, but none of them is far below the best."""
    model = on_gpu(variant, torch.bfloat16)
    stock = stock_copy(model)
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager)
    lengths = [33, 70, 7]
    output = model.generate(**cuda(batch(lengths)), max_new_tokens=24)
    worse = []
    for row, length in zip(output, lengths, strict=True):
        tokens = row[70 - length :]
        logits = stock(tokens[None, :-1]).logits[0, length - 1 :].float()
        chosen = logits.gather(1, tokens[length:, None])[:, 0]
        worse += ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()
    assert max(worse) < 0.5
    assert sum(gap > 0 for gap in worse) < len(worse) / 4
