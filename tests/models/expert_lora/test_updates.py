"""What kernels read of LoRA on experts' weights, and which of it they leave to PEFT's operations."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_equal
from expert_blocks import parts_of, rows_of
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from wrapped_blocks import block_in, wrapped_block

from hf_paged.kernels.experts.join import join_experts
from hf_paged.models import experts as module
from hf_paged.models.expert_lora.folding import folded_weights
from hf_paged.models.expert_lora.updates import updates_of
from hf_paged.models.experts import ExpertsParts, apply_experts
from hf_paged.models.tuners import inside_wrappers


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@torch.no_grad()
def test_updates_make_the_sums(name):
    block = block_in(wrapped_block(name))
    sums, inner, parts = folded_weights(block.experts), inside_wrappers(block.experts), parts_of(block)
    assert isinstance(parts, ExpertsParts), parts
    for key, weights in (("gate_up_proj", parts.gate_up), ("down_proj", parts.down)):
        assert weights.weight is inner._parameters[key]
        assert_equal(weights.folded().weight, sums[key])
        wrapper = next(w for w in (block.experts, block.experts.base_layer) if w.parameter_name == key)
        assert weights.update.a is wrapper.lora_A["default"].weight
        assert weights.update.b is wrapper.lora_B["default"].weight


@pytest.mark.parametrize("rows", [1, 40])
@torch.no_grad()
def test_blocks_are_stocks(rows):
    wrapped, hidden = wrapped_block("qwen3-moe"), rows_of(rows)
    block, results = block_in(wrapped), []
    for active in (["default"], ["second"], []):
        wrapped.base_model.set_adapter(active)
        results.append(block(hidden[None])[0])
        assert_equal(join_experts(parts_of(block).outputs(hidden, None)), results[-1])
        assert_equal(apply_experts(block, None, hidden, None)[0], results[-1])
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@torch.no_grad()
def test_routes_of_experts_that_are_wrapped_are_recorded():
    block, hidden, seen = block_in(wrapped_block("qwen3-moe")), rows_of(9), []
    expected = block(hidden[None])[0]
    assert_equal(apply_experts(block, None, hidden, None, seen.append)[0], expected)
    assert_equal(seen[0], block.gate(hidden)[2])


@torch.no_grad()
def test_a_block_that_changes_its_routes_runs_pefts_sums():
    block, hidden = block_in(wrapped_block()), rows_of(6)
    forwards = module._Forwards(block.gate, block.experts, parts_of(block), None)
    _, scores, experts = forwards.route(hidden)
    assert_equal(forwards.run(hidden, experts, 2 * scores), block.experts(hidden, experts.long(), 2 * scores))


def test_parts_are_those_of_the_present_adapters():
    wrapped = wrapped_block("qwen3-moe")
    block = block_in(wrapped)
    arrivals = module.new_arrivals(torch.device("cpu"))

    def read():
        return module.read_experts(block, "grouped_mm", torch.bfloat16, arrivals)

    def change_scale(scale):
        block.experts.scaling["default"] = scale

    one = read()
    assert one.is_same(read()) and module._current(block, one) is one
    b = block.experts.lora_B["default"]
    weight, scale = b.weight, block.experts.scaling["default"]
    for change, undo in (
        (lambda: wrapped.set_adapter("second"), lambda: wrapped.set_adapter("default")),
        (lambda: wrapped.base_model.set_adapter([]), lambda: wrapped.set_adapter("default")),
        (lambda: change_scale(7.5), lambda: change_scale(scale)),
        (lambda: setattr(b, "weight", nn.Parameter(weight.clone())), lambda: setattr(b, "weight", weight)),
    ):
        change()
        assert not one.is_same(read()) and module._current(block, one) is None
        undo()
        assert one.is_same(read()) and module._current(block, one) is one


def merge_and_switch_off(wrapped, wrapper):
    wrapped.merge_adapter()
    wrapped.base_model.disable_adapter_layers()


CHANGES = {
    "merged adapters, and is switched off": merge_and_switch_off,
    "2 active adapters": lambda wrapped, wrapper: wrapped.base_model.set_adapter(["default", "second"]),
    "other tensors than": lambda wrapped, wrapper: setattr(
        wrapper.lora_A["default"], "weight", nn.Parameter(wrapper.lora_A["default"].weight[:-1])),
    "other tensors": lambda wrapped, wrapper: wrapper.lora_A["default"].half(),
    "other tensors than PEFT": lambda wrapped, wrapper: wrapper.lora_B["default"].register_forward_hook(print),
    "has hooks": lambda wrapped, wrapper: wrapper.register_forward_hook(print),
}


@pytest.mark.parametrize("why", CHANGES)
def test_blocks_of_other_adapters_run_modules(why):
    wrapped = wrapped_block()
    CHANGES[why](wrapped, block_in(wrapped).experts)
    assert why in parts_of(block_in(wrapped))


def test_ranks_that_kernels_take():
    assert isinstance(parts_of(block_in(wrapped_block(r=64))), ExpertsParts)
    assert "a rank of more than 64" in parts_of(block_in(wrapped_block(r=65)))


def test_sums_that_are_rounded_twice_run_modules(monkeypatch):
    block = block_in(wrapped_block())
    monkeypatch.delattr(ParamWrapper, "get_delta_factors")
    assert "before 0.21" in updates_of(block.experts)
