"""Blocks of experts by hf_paged's operations: stock's numbers to the bit, and blocks that run by their own modules."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from derived_models import CLASSES, derived_model
from exactness import assert_equal
from expert_blocks import CONFIGS, block_of, parts_of, router_of, rows_of
from family_models import family_model
from lora_models import randomize, with_expert_adapter
from outlines import outlined
from support import assert_same_tensor, batch
from torch import nn
from transformers import GenerationConfig
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.utils import output_capturing

import hf_paged
from hf_paged.guards.expert_code import ROUTERS, ignores_logits, known_code
from hf_paged.kernels.experts.join import join_experts
from hf_paged.kernels.experts.route import Routes, grouped, new_arrivals, route_reference
from hf_paged.models import experts as module
from hf_paged.models.executor import view_of
from hf_paged.models.experts import ExpertsParts, apply_experts, read_experts
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import shard_experts

OTHER_GRANITE = pytest.mark.skipif(known_code(GraniteMoeTopKRouter.forward, ROUTERS) is None,
                                   reason="the router of an older transformers has other code")
CASES = [pytest.param(name, marks=OTHER_GRANITE) if name == "granite-moe" else name for name in CONFIGS]
ALONE = ["qwen3-moe", "qwen3-moe without norm", "olmoe", "mixtral"]


def result_of(block, hidden):
    found = block(hidden[None])
    return (found[0] if isinstance(found, tuple) else found)[0]


def in_view(block, hidden, lengths=None):
    """The block's own forward, with a router and experts by operations."""
    parts = parts_of(block, is_alone=False)
    assert isinstance(parts, ExpertsParts), parts
    forwards = module._Forwards(router_of(block), block.experts, parts, lengths)
    replaced = {"gate" if hasattr(block, "gate") else "router": forwards.route, "experts": forwards.run}
    return result_of(view_of(block, replaced), hidden)


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("name", ALONE)
@torch.no_grad()
def test_blocks_of_nothing_else_are_stocks(name, rows):
    block, hidden = block_of(name), rows_of(rows)
    parts = parts_of(block)
    assert isinstance(parts, ExpertsParts), parts
    assert_equal(join_experts(parts.outputs(hidden, None)), block(hidden[None])[0])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_blocks_in_a_view_are_stocks(name, rows, ties):
    """With ties a CPU's `topk` chooses others of two experts that are alike; without, of a few rows as well."""
    block, hidden = block_of(name, ties=ties), rows_of(rows)
    parts = parts_of(block, is_alone=False)
    mine, stocks = (experts.long().sort()[0] for experts in (
        route_reference(hidden, parts.router, parts.rule).experts, stocks_routes(block, hidden)[2]))
    same = (mine == stocks).all(1) | ties
    assert same.float().mean() > 0.9
    assert_equal(in_view(block, hidden)[same], result_of(block, hidden)[same])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_routers_are_stocks(name, dtype):
    block, hidden = block_of(name, dtype), rows_of(50, dtype)
    parts = parts_of(block, dtype, is_alone=False)
    found = route_reference(hidden, parts.router, parts.rule)
    _, scores, experts = stocks_routes(block, hidden)
    # Of the sigmoid router torch gives the best in any order, and equal ones in any.
    for mine, stock in zip((found.scores, found.experts), (scores, experts.int()), strict=True):
        if parts.rule.kind == "sigmoid":
            mine, stock = mine.sort()[0], stock.sort()[0]
        same = (mine == stock).all(1)
        assert same.float().mean() > 0.9 if mine.dtype != scores.dtype else same.all()
    assert found.scores.dtype == scores.dtype


def stocks_routes(block, hidden):
    given = [block.e_score_correction_bias] if "e_score_correction_bias" in block._buffers else []
    return router_of(block)(hidden, *given)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_experts_are_stocks(name):
    block, hidden = block_of(name), rows_of(30)
    _, scores, experts = stocks_routes(block, hidden)
    routes = Routes(scores, experts.int(), *grouped(experts, 16))
    products = parts_of(block, is_alone=False).products(hidden, routes)
    assert_equal(join_experts(products), block.experts(hidden, experts, scores))


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss", "minimax-m2", "glm4-moe"])
@torch.no_grad()
def test_of_equal_experts_the_first_are_chosen(name):
    """With the scores of stock, whose `topk` on a CPU takes others of them."""
    block, hidden = block_of(name, ties=True), rows_of(30)
    parts = parts_of(block, is_alone=False)
    found = route_reference(hidden, parts.router, parts.rule)
    assert_equal(found.scores.sort()[0], stocks_routes(block, hidden)[1].sort()[0])
    first = found.experts[:, :2]
    assert torch.equal(first[:, 1], first[:, 0] + 1) and not (first[:, 0] % 2).any()
    assert not (found.experts[:, 2] % 2).any()


@torch.no_grad()
def test_a_block_that_changes_its_routes_runs_stocks_experts(monkeypatch):
    block, hidden = block_of("mixtral"), rows_of(6)
    forward = type(block.experts).forward
    called = []
    monkeypatch.setattr(type(block.experts), "forward", lambda *args: called.append(1) or forward(*args))
    parts = parts_of(block)
    forwards = module._Forwards(block.gate, block.experts, parts, None)
    _, scores, experts = forwards.route(hidden[None])
    assert_equal(forwards.run(hidden, experts, scores), result_of(block, hidden))
    assert len(called) == 1
    assert_equal(forwards.run(hidden, experts, 2 * scores), 2 * result_of(block, hidden))
    assert len(called) == 3


@torch.no_grad()
def test_hidden_states_of_another_dtype_run_stocks_router():
    block = block_of("glm4-moe")
    forwards = module._Forwards(block.gate, block.experts, parts_of(block, is_alone=False), None)
    for mine, stock in zip(forwards.route(rows_of(3).float()), block.gate(rows_of(3).float()), strict=True):
        assert_equal(mine, stock)


@torch.no_grad()
def test_padding_rows_in_a_view():
    block, hidden = block_of("qwen2-moe"), rows_of(4)
    lengths = torch.tensor([3, 0, 9, 1], dtype=torch.int32)
    assert_equal(in_view(block, hidden, lengths)[lengths > 0], result_of(block, hidden)[lengths > 0])


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


def test_more_rows_than_the_kernels_take(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 300)
    parts = parts_of(block_of("qwen3-moe"))
    assert parts.outputs(rows_of(300), None) is not None
    assert parts.outputs(rows_of(301), None) is None


@torch.no_grad()
def test_a_ranks_part_in_a_view():
    block, hidden, ranks = block_of("qwen2-moe"), rows_of(9), Ranks(0, 2)
    ranks.all_reduce = lambda tensor: 2 * tensor
    shard_experts(block.experts, ranks, (0, 32))
    assert parts_of(block, is_alone=False).ranks is ranks
    assert_equal(in_view(block, hidden), result_of(block, hidden))


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


def test_parts_are_not_kept_for_other_weights_or_hooks():
    block = block_of("gpt-oss")
    parts = parts_of(block, is_alone=False)
    assert module._current(block, parts) is parts
    bias = block.experts.down_proj_bias
    block.experts.down_proj_bias = nn.Parameter(bias.detach().clone())
    assert module._current(block, parts) is None
    block.experts.down_proj_bias = bias
    assert module._current(block, parts) is parts
    block.router.register_forward_hook(lambda *args: None)
    assert module._current(block, parts) is None
    block = block_of("minimax-m2")
    parts = parts_of(block, is_alone=False)
    block.e_score_correction_bias = block.e_score_correction_bias.clone()
    assert module._current(block, parts) is None


def _strided(block):
    weight = block.experts.down_proj
    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = {
    "has hooks": lambda block: block.gate.register_forward_hook(lambda *args: None),
    "other modules than": lambda block: block.add_module("shared", nn.Linear(2, 2)),
    "another activation": lambda block: setattr(block.experts, "act_fn", nn.GELU()),
    "than down_proj and down_proj_bias and": lambda block: setattr(block.experts, "has_bias", True),
    "has_gate=False": lambda block: setattr(block.experts, "has_gate", False),
    "the experts are a Linear": lambda block: setattr(block, "experts", nn.Linear(2, 2)),
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
    assert "other modules than" in parts_of(block_of("glm4-moe"))
    block = block_of("glm4-moe")
    block.gate.e_score_correction_bias = block.gate.e_score_correction_bias.double()
    assert "in e_score_correction_bias no buffer" in parts_of(block, is_alone=False)
    block.forward = lambda hidden: hidden
    assert "has hooks" in parts_of(block, is_alone=False)


class ReadsLogits(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.gate, self.experts = block.gate, block.experts

    def forward(self, hidden):
        logits, scores, experts = self.gate(hidden)
        return self.experts(hidden, experts, scores), logits


def test_a_block_that_reads_its_routers_logits():
    assert not ignores_logits(ReadsLogits)
    assert "may read more of its router" in parts_of(ReadsLogits(block_of("mixtral")), is_alone=False)


def test_hooks_that_capture_outputs_do_nothing():
    block = block_of("mixtral")
    output_capturing.install_output_capuring_hook(block.gate, "router_logits", 0)
    assert isinstance(parts_of(block), ExpertsParts)


def test_code_that_differs_in_a_constant_is_not_known():
    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight, self.bias)
        router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-2)
        router_scores = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)
        return router_logits, router_scores, router_indices

    assert known_code(forward, ROUTERS) is None
    assert known_code(torch.softmax, ROUTERS) is None


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The operations' references run on a CPU; the number of rows that each block's experts got."""
    seen = []
    monkeypatch.setattr(module, "why_not_on", lambda device: None)
    products = ExpertsParts.products

    def counted(self, hidden, routes):
        seen.append(len(hidden))
        return products(self, hidden, routes)

    monkeypatch.setattr(ExpertsParts, "products", counted)
    return seen


def assert_same_tokens_with_kernels(model, inputs, seen):
    """Leaves the model enabled."""
    hf_paged.enable(model, strict=True, fused_experts=False)
    expected = model.generate(**inputs, max_new_tokens=10)
    hf_paged.disable(model)
    assert not seen
    hf_paged.enable(model, strict=True)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=10), expected)


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3-moe-mixed"])
def test_a_model_gives_stocks_tokens(on_a_cpu, variant):
    model = family_model(variant).to(torch.bfloat16)
    inputs = batch([33, 17, 4])
    assert_same_tokens_with_kernels(model, inputs, on_a_cpu)
    assert on_a_cpu.count(3) >= 9 and (variant == "qwen3-moe-mixed" or 54 in on_a_cpu)
    hf_paged.disable(model)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "Olmoe", "DeepseekV3", "MiniMaxM2", "Qwen2Moe",
                                  pytest.param("GraniteMoe", marks=OTHER_GRANITE)])
def test_a_model_of_modules_gives_stocks_tokens(on_a_cpu, name):
    made = derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name)
    model, inputs = outlined(made.to(torch.float16)), batch([33, 17, 4])
    assert_same_tokens_with_kernels(model, inputs, on_a_cpu)
    assert on_a_cpu.count(3) >= 9 and 54 in on_a_cpu
    assert not any("forward" in vars(one) for one in model.modules())
    hf_paged.disable(model)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_lora_on_experts_gives_stocks_tokens(on_a_cpu, name):
    """Also under another adapter, and after one was trained: what was read of the first is of no use."""
    model = family_model(name).to(torch.float16)
    wrapped = with_expert_adapter(model if name == "qwen3-moe" else outlined(model), scale=0.3)
    with_expert_adapter(wrapped, "second", 6, r=3, scale=0.3)
    inputs, outputs = batch([33, 17, 4]), []
    hf_paged.enable(wrapped, strict=True)
    for change in (lambda: None, lambda: wrapped.set_adapter("second"), lambda: randomize(wrapped, "second", 9, 0.3)):
        change()
        count = len(on_a_cpu)
        outputs.append(wrapped.generate(**inputs, max_new_tokens=10))
        assert on_a_cpu[count:].count(3) >= 9 and 54 in on_a_cpu[count:]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MAX_ROWS", 0)
            assert_same_tensor(wrapped.generate(**inputs, max_new_tokens=10), outputs[-1])
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])
    hf_paged.disable(wrapped)


def test_new_parameters_are_looked_up_for_a_call(on_a_cpu):
    """Old ones are not kept, whose memory is the model's size."""
    model = outlined(family_model("mixtral").to(torch.float16))
    hf_paged.enable(model, strict=True)
    model.generate(**batch([9]), max_new_tokens=2)
    experts = model.model.layers[0].mlp.experts
    old = weakref.ref(experts.down_proj)
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * 2)
    model.generate(**batch([9]), max_new_tokens=2)
    gc.collect()
    assert old() is None
    hf_paged.disable(model)


def test_a_step_of_many_tokens_runs_modules(on_a_cpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 20)
    model = outlined(family_model("mixtral").to(torch.float16))
    hf_paged.enable(model, strict=True)
    model.generate(**batch([33, 17]), max_new_tokens=4)
    assert set(on_a_cpu) == {2}
    hf_paged.disable(model)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_a_hook_between_two_steps_has_the_module_run(on_a_cpu, name):
    """A streaming caller's code runs between steps."""
    model = family_model(name).to(torch.bfloat16)
    if name == "mixtral":
        outlined(model)
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
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(torch.zeros_like(experts.down_proj, dtype=torch.bfloat16))
    engine.step()
    assert len(on_a_cpu) == count + 5
    hf_paged.disable(model)


@pytest.mark.parametrize("variant", ["qwen3-moe", "gpt-oss"])
def test_why_modules_run_is_logged(caplog, variant):
    caplog.set_level("INFO", "hf_paged")
    model = outlined(family_model(variant)) if variant == "gpt-oss" else family_model(variant)
    for options, why in (({}, "need Triton and an NVIDIA GPU"), ({"fused_experts": False}, "fused_experts=False")):
        hf_paged.enable(model, **options)
        model.generate(**batch([5]), max_new_tokens=1)
        hf_paged.disable(model)
        assert why in [record.getMessage() for record in caplog.records if "experts run" in record.msg][-1]
