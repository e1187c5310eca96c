"""Experts with LoRA on their weights: PEFT's sums to the bit in every state, by a view that leaves the module alone."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_equal
from expert_blocks import block_of, router_of, rows_of
from lora_models import EXPERTS
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from wrapped_blocks import block_in, wrapped_block

from hf_paged.models.expert_lora.folding import (
    folded_bytes,
    folded_forward,
    folded_layers,
    folded_weights,
    outermost_wrappers,
    why_not_wrapped,
)
from hf_paged.models.tuners import inside_wrappers, wraps_experts


def sums_in_a_forward(block, hidden):
    """What experts' weights are while PEFT's own forward runs, and its result."""
    seen = {}

    def note(module, args):
        seen.update({name: getattr(module, name).detach() for name in ("gate_up_proj", "down_proj")})

    handle = inside_wrappers(block.experts).register_forward_pre_hook(note)
    given = [block.e_score_correction_bias] if "e_score_correction_bias" in block._buffers else []
    _, scores, experts = router_of(block)(hidden, *given)
    result = block.experts(hidden, experts, scores)
    handle.remove()
    return seen, (hidden, experts, scores), result


def assert_pefts(block):
    hidden = rows_of(9, inside_wrappers(block.experts).down_proj.dtype)
    seen, arguments, result = sums_in_a_forward(block, hidden)
    inner = inside_wrappers(block.experts)
    state = type(inner), dict(inner._parameters), {name: w._version for name, w in inner._parameters.items()}
    folded = folded_weights(block.experts)
    for name, weight in seen.items():
        assert_equal(folded.get(name, inner._parameters[name]), weight)
    assert_equal(folded_forward(block.experts)(*arguments), result)
    assert state == (type(inner), dict(inner._parameters), {n: w._version for n, w in inner._parameters.items()})
    return folded, result


@pytest.mark.parametrize(("dtype", "adapters"), [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
                                                 (torch.float32, torch.float32)])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@torch.no_grad()
def test_every_state_is_pefts(name, dtype, adapters):
    wrapped = wrapped_block(name, dtype, adapters)
    block, results = block_in(wrapped), []
    for active in (["default"], ["second"], ["default", "second"], ["second", "default"], []):
        wrapped.base_model.set_adapter(active)
        folded, result = assert_pefts(block)
        assert len(folded) == (2 if active else 0)
        results.append(result)
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i] if i != 3)
    wrapped.set_adapter("default")
    with wrapped.disable_adapter():
        assert not assert_pefts(block)[0]
    wrapped.merge_adapter()
    assert not assert_pefts(block)[0]
    wrapped.unmerge_adapter()
    assert len(assert_pefts(block)[0]) == 2


@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:], EXPERTS[::-1]])
@torch.no_grad()
def test_one_weight_and_any_order(parameters):
    block = block_in(wrapped_block(parameters=parameters))
    assert {f"experts.{name}" for name in assert_pefts(block)[0]} == set(parameters)


@torch.no_grad()
def test_sums_of_a_peft_without_factors_are_rounded_twice(monkeypatch):
    block = block_in(wrapped_block())
    new = folded_weights(block.experts)
    monkeypatch.delattr(ParamWrapper, "get_delta_factors")
    old = folded_weights(block.experts)
    for wrapper in (block.experts, block.experts.base_layer):
        name = wrapper.parameter_name
        assert_equal(old[name], wrapper.get_param() + wrapper.get_delta_weight("default"))
        assert not torch.equal(old[name], new[name])


def test_what_is_wrapped():
    wrapped = wrapped_block()
    block = block_in(wrapped)
    found = outermost_wrappers(wrapped.named_modules())
    assert [(path, id(module)) for path, module in found] == [("base_model.model.mlp.experts", id(block.experts))]
    inner = inside_wrappers(block.experts)
    assert inner is block.experts.base_layer.base_layer and inside_wrappers(inner) is inner
    assert not any(map(wraps_experts, (block, inner, block.gate, None)))
    assert folded_bytes(wrapped) == inner.gate_up_proj.nbytes + inner.down_proj.nbytes
    assert folded_bytes(block_of("mixtral")) == 0
    matrices = {module for module in wrapped.modules() if type(module) is nn.Linear}
    assert folded_layers(wrapped) == matrices and len(matrices) == 8
    assert folded_forward(inner) == inner.forward


def test_why_not():
    wrapped = wrapped_block()
    block = block_in(wrapped)
    inner = inside_wrappers(block.experts)

    def why():
        return why_not_wrapped(wrapped.named_modules())

    assert why() is None
    inner.forward = inner.forward
    assert "is replaced" in str(why())
    del inner.forward
    wrapped.merge_adapter()
    assert why() is None
    with wrapped.disable_adapter():
        assert "is merged into base_model.model.mlp.experts, whose adapters" in str(why())
    wrapped.unmerge_adapter()
