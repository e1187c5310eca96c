"""Blocks of experts by hf_paged's operations: stock's numbers to the bit, and blocks that run by their own modules."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_equal
from family_models import family_model
from support import assert_same_tensor, batch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

import hf_paged
from hf_paged.kernels.experts.join import join_experts
from hf_paged.kernels.experts.route import RouterWeights, route_reference
from hf_paged.models import experts as module
from hf_paged.models.experts import ExpertsParts, apply_experts, new_arrivals, read_experts
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import shard_experts

SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "num_experts_per_tok": 3}
CONFIGS = {
    "qwen3-moe": (Qwen3MoeConfig, {"num_experts": 16, "norm_topk_prob": True}),
    "qwen3-moe without norm": (Qwen3MoeConfig, {"num_experts": 16, "norm_topk_prob": False}),
    "olmoe": (OlmoeConfig, {"num_experts": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 12}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 16}),
    "glm4-moe": (Glm4MoeConfig, {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
                                 "routed_scaling_factor": 1.5}),
}


def block_of(name, dtype=torch.bfloat16, ties=False):
    kind, settings = CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(kind(**(SHAPE | settings)), experts_implementation="batched_mm")
        block = model.eval().model.layers[0].mlp
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.normal_(0.0, 0.3)
            for buffer in block.buffers():
                buffer.uniform_(0.0, 0.5)
            if ties:
                weight = router_of(block).weight
                weight.copy_(weight[torch.arange(len(weight)) // 2 * 2])
    return block.to(dtype) if name != "glm4-moe" else in_dtype(block, dtype)


def in_dtype(block, dtype):
    for parameter in block.parameters():  # the correction stays float32, as `from_pretrained` has it
        parameter.data = parameter.data.to(dtype)
    return block


def router_of(block):
    return getattr(block, "gate", None) or block.router


def rows_of(count, dtype=torch.bfloat16):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count)).to(dtype)


def parts_of(block, dtype=torch.bfloat16):
    return read_experts(block, "batched_mm", dtype, new_arrivals(torch.device("cpu")))


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe without norm", "olmoe", "mixtral"])
@torch.no_grad()
def test_blocks_are_stocks(name, rows):
    block, hidden = block_of(name), rows_of(rows)
    parts = parts_of(block)
    assert isinstance(parts, ExpertsParts), parts
    assert_equal(join_experts(parts.outputs(hidden, None)), block(hidden[None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_routers_are_stocks(name, dtype):
    router = router_of(block_of(name, dtype))
    hidden = rows_of(50, dtype)
    rule = module._ROUTERS[type(router).__module__, type(router).__name__](router)
    weights = RouterWeights(router.weight, getattr(router, "bias", None),
                            getattr(router, "e_score_correction_bias", None))
    found = route_reference(hidden, weights, rule)
    _, scores, experts = router(hidden)
    # Of the sigmoid router torch gives the best in any order, and equal ones in any.
    for mine, stock in zip((found.scores, found.experts), (scores, experts.int()), strict=True):
        if name == "glm4-moe":
            mine, stock = mine.sort()[0], stock.sort()[0]
        same = (mine == stock).all(1)
        assert same.float().mean() > 0.9 if mine.dtype != scores.dtype else same.all()
    assert found.scores.dtype == scores.dtype


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
@torch.no_grad()
def test_of_equal_experts_the_first_are_chosen(name):
    """With the scores of stock, whose `topk` on a CPU takes others of them."""
    router, hidden = router_of(block_of(name, ties=True)), rows_of(30)
    rule = module._ROUTERS[type(router).__module__, type(router).__name__](router)
    bias = getattr(router, "bias", None)
    if bias is not None:
        bias.zero_()
    found = route_reference(hidden, RouterWeights(router.weight, bias), rule)
    assert_equal(found.scores, router(hidden)[1])
    first = found.experts[:, :2]
    assert torch.equal(first[:, 1], first[:, 0] + 1) and not (first[:, 0] % 2).any()
    assert not (found.experts[:, 2] % 2).any()


@torch.no_grad()
def test_padding_rows_leave_the_others_as_they_are():
    block, hidden = block_of("qwen3-moe"), rows_of(6)
    lengths = torch.tensor([3, 0, 9, 1, 0, 0], dtype=torch.int32)
    outputs = parts_of(block).outputs(hidden, lengths)
    assert int(outputs.routes.groups[:, 2].clamp(min=0).sum()) == 3 * 3
    joined = join_experts(outputs)
    assert_equal(joined[lengths > 0], block(hidden[None])[0][lengths > 0])
    assert not joined[lengths == 0].any()


class Ranks(ParallelGroup):
    """Ranks whose sums are left to the test."""

    def all_reduce(self, tensor):
        return tensor


@pytest.mark.parametrize("rank", [0, 1])
@torch.no_grad()
def test_a_ranks_part_of_every_expert(rank):
    block, hidden, ranks = block_of("qwen3-moe"), rows_of(9), Ranks(rank, 2)
    shard_experts(block.experts, ranks, ((0, 32), (32, 48))[rank])
    parts = parts_of(block)
    found, summed_over = apply_experts(block, parts, hidden, None)
    assert summed_over is ranks
    assert_equal(found, block(hidden[None])[0])


def test_more_rows_than_the_kernels_take():
    assert parts_of(block_of("qwen3-moe")).outputs(rows_of(257), None) is None


def test_parts_are_the_same_for_the_same_weights():
    block, arrivals = block_of("qwen3-moe"), new_arrivals(torch.device("cpu"))
    one = read_experts(block, "grouped_mm", torch.bfloat16, arrivals)
    assert one.is_same(read_experts(block, "batched_mm", torch.bfloat16, arrivals))
    assert not one.is_same("a reason")
    block.gate.top_k = 2
    assert not one.is_same(read_experts(block, "batched_mm", torch.bfloat16, arrivals))
    block.gate.top_k = 3
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.detach().clone())
    assert not one.is_same(read_experts(block, "batched_mm", torch.bfloat16, arrivals))


def _strided(block):
    weight = block.experts.down_proj
    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = {
    "has hooks, or": lambda block: block.gate.register_forward_hook(lambda *args: None),
    "or other modules than": lambda block: block.add_module("shared", nn.Linear(2, 2)),
    "another activation": lambda block: setattr(block.experts, "act_fn", nn.GELU()),
    "has_bias=True": lambda block: setattr(block.experts, "has_bias", True),
    "in gate_up_proj no plain": lambda block: setattr(
        block.experts, "gate_up_proj", nn.Parameter(torch.zeros(16, 96, 64))),
    "in down_proj no plain": _strided,
    "in weight no plain": lambda block: setattr(block.gate, "weight", nn.Parameter(torch.zeros(16, 64))),
    "other parameters than": lambda block: block.experts.register_parameter(
        "more", nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))),
    "weights [16, 96, 64] and [16, 64, 32]": lambda block: setattr(block.experts, "down_proj", nn.Parameter(
        torch.zeros(16, 64, 32, dtype=torch.bfloat16))),
    "the router is a Linear": lambda block: setattr(block, "gate", nn.Linear(64, 16)),
    "chooses 17 of 16": lambda block: setattr(block.gate, "top_k", 17),
}


@pytest.mark.parametrize("message", CHANGES)
def test_blocks_that_run_by_their_own_modules(message):
    block = block_of("qwen3-moe")
    CHANGES[message](block)
    found = parts_of(block)
    assert isinstance(found, str) and message in found


def test_models_that_run_by_their_own_modules():
    block, arrivals = block_of("qwen3-moe"), new_arrivals(torch.device("cpu"))
    assert "'eager'" in read_experts(block, "eager", torch.bfloat16, arrivals)
    assert "torch.float32" in read_experts(block, "grouped_mm", torch.float32, arrivals)
    assert "is_concatenated=False" in parts_of(block_of("gpt-oss"))
    assert "other modules than" in parts_of(block_of("glm4-moe"))


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The operations' references run on a CPU; the number of rows that each block's experts got."""
    seen = []
    monkeypatch.setattr(module, "why_not_on", lambda device: None)
    outputs = ExpertsParts.outputs

    def counted(self, hidden, lengths):
        seen.append(len(hidden))
        return outputs(self, hidden, lengths)

    monkeypatch.setattr(ExpertsParts, "outputs", counted)
    return seen


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3-moe-mixed"])
def test_a_model_gives_stocks_tokens(on_a_cpu, variant):
    model = family_model(variant).to(torch.bfloat16)
    inputs = batch([33, 17, 4])
    hf_paged.enable(model, strict=True, fused_experts=False)
    expected = model.generate(**inputs, max_new_tokens=10)
    hf_paged.disable(model)
    assert not on_a_cpu
    hf_paged.enable(model, strict=True)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=10), expected)
    assert on_a_cpu.count(3) >= 9 and (variant == "qwen3-moe-mixed" or 54 in on_a_cpu)
    hf_paged.disable(model)


def test_a_hook_between_two_steps_has_the_module_run(on_a_cpu):
    """A streaming caller's code runs between steps."""
    model = family_model("qwen3-moe").to(torch.bfloat16)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=False))
    engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=6))
    engine.step()
    count, called = len(on_a_cpu), []
    assert count
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda *args: called.append(1))
    engine.step()
    handle.remove()
    assert len(called) == 1 and len(on_a_cpu) == count + 1
    engine.step()
    assert len(on_a_cpu) == count + 3
    hf_paged.disable(model)


def test_why_modules_run_is_logged(caplog):
    caplog.set_level("INFO", "hf_paged")
    model = family_model("qwen3-moe")
    for options, why in (({}, "need Triton and an NVIDIA GPU"), ({"fused_experts": False}, "fused_experts=False")):
        hf_paged.enable(model, **options)
        model.generate(**batch([5]), max_new_tokens=1)
        hf_paged.disable(model)
        assert why in [record.getMessage() for record in caplog.records if "experts run" in record.msg][-1]
