"""transformers' own capturing hooks stay on a model after a forward that asked for hidden states and the like."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import VARIANTS, family_model
from support import assert_falls_back, assert_native_parity, batch, tiny_model
from torch import nn
from transformers.utils import output_capturing

import hf_paged
from hf_paged.guards.hooks import only_captures


def _captured(model, **wanted):
    """One forward that asks for outputs which transformers collects by hooks."""
    with torch.no_grad():
        output = model(**batch([12, 5]), **wanted)
    assert any(module._forward_hooks for module in model.modules()), "this forward installs no hooks"
    return output


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3-moe-mixed", *(v for v in VARIANTS if "-" not in v), "gpt-oss"])
@pytest.mark.parametrize("enable_first", [False, True])
def test_capturing_hooks_are_none(variant, enable_first):
    model = family_model(variant, attn_implementation="eager")
    if enable_first:
        hf_paged.enable(model, strict=True)
    _captured(model, output_hidden_states=True, output_attentions=True)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **batch([40, 7]), max_new_tokens=6)
    assert_native_parity(hf_paged.enable(copy.deepcopy(model), strict=True), **batch([40, 7]), max_new_tokens=6)


def test_a_training_step_with_the_auxiliary_loss_of_experts():
    model = hf_paged.enable(family_model("qwen3-moe"), strict=True)
    inputs = batch([12, 12])
    model.train()
    model(**inputs, labels=inputs["input_ids"], output_router_logits=True).loss.backward()
    assert_native_parity(model.eval(), **batch([20, 7]), max_new_tokens=6)


def test_a_hook_of_the_users_own_beside_them_is_a_hook():
    model = tiny_model()
    _captured(model, output_hidden_states=True)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    assert_falls_back(model, r"model.layers.0 has a forward hook", **batch([20, 7]), max_new_tokens=6)


def test_a_function_that_only_has_the_hooks_name_is_a_hook():
    def output_capturing_hook(module, args, output):
        return -output

    model = tiny_model()
    model.model.norm.register_forward_hook(output_capturing_hook)
    assert not only_captures(output_capturing_hook)
    assert_falls_back(model, "model.norm has a forward hook", **batch([20, 7]), max_new_tokens=6)


def test_transformers_installer_is_found():
    linear = nn.Linear(2, 2)
    output_capturing.install_output_capuring_hook(linear, "hidden_states", 0)
    (hook,) = linear._forward_hooks.values()
    assert only_captures(hook)
