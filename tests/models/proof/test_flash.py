"""Classes of which a proof with eager attention holds for FlashAttention, and classes of which it does not."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from torch import nn

from hf_paged.models.proof.calls import AttentionRecord
from hf_paged.models.proof.checks.flash import _questions, check_flash
from hf_paged.models.proof.mask_kinds import FULL, MaskKind
from hf_paged.models.proof.verdict import Refused

SLIDING = AttentionRecord("attention", MaskKind("sliding", 20), 4, 2, 16, 16, None, None, False, window=20)


def model(*, is_causal=True):
    found = nn.Module()
    found.attention = nn.Module()
    found.attention.is_causal = is_causal
    return found


@pytest.mark.parametrize("call", [SLIDING, replace(SLIDING, mask=FULL, window=None)])
def test_windows_of_masks_are_handed_down(call):
    check_flash(model(), "attention", [call])


@pytest.mark.parametrize("call", [
    replace(SLIDING, window=None), replace(SLIDING, window=21), replace(SLIDING, mask=FULL),
    replace(SLIDING, mask=MaskKind("chunked", 20)), replace(SLIDING, mask=MaskKind("chunked", 20), window=None),
])
def test_other_windows_than_the_masks(call):
    with pytest.raises(Refused, match="a window of"):
        check_flash(model(), "attention", [call])


def test_a_module_that_is_not_causal_by_itself():
    with pytest.raises(Refused, match="attention is not causal without a mask"):
        check_flash(model(is_causal=False), "attention", [SLIDING])


@pytest.mark.parametrize(("code", "asked"), [
    ("f = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)", []),
    ("def forward(self, **kwargs: Unpack[FlashAttentionKwargs]): 'By flash attention.'", []),
    ("_supports_flash_attn = True", []),
    ("names = ['flash_attention_2']", []),
    ("x = 1 if self.config._attn_implementation == 'eager' else 2", ["self.config._attn_implementation"]),
    ("if is_flash_attention_requested(self.config): pass", ["is_flash_attention_requested"]),
    ("x = getattr(config, '_attn_implementation')", ["'_attn_implementation'"]),
])
def test_code_that_asks_which_attention_runs(code, asked):
    assert list(_questions(ast.parse(code))) == asked
