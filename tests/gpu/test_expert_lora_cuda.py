"""On a GPU: LoRA on experts' weights, folded by kernels as torch rounds PEFT's sums there, and graphs of models."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from on_gpu import cuda_batch
from support import LOGITS, assert_same_but_for_near_ties

import hf_paged
from hf_paged.kernels.experts.down import down
from hf_paged.kernels.experts.fold import ExpertUpdate
from hf_paged.kernels.experts.gate_up import SILU_GATING, ExpertWeights, Gating, gate_up
from hf_paged.kernels.experts.route import Routes, grouped
from hf_paged.models.experts import ExpertsParts

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
CLAMPED = Gating(is_interleaved=True, limit=1.5, alpha=1.702)


def weights_of(experts, rows, columns, rank, dtype=torch.bfloat16, adapters=torch.float32, transposed=False):
    """Weights whose update is about as large as they are."""
    g = torch.Generator("cuda").manual_seed(rank)
    weight, a, b = (torch.randn(shape, device="cuda", generator=g) for shape in (
        (experts, rows, columns), (experts * rank, columns), (rows, rank * experts)))
    weight = (weight * columns**-0.5).to(dtype)
    update = ExpertUpdate((a * columns**-0.5).to(adapters), b.to(adapters), 1.7 / rank)
    return ExpertWeights(weight.mT.contiguous() if transposed else weight, None, transposed, update)


def routes_of(rows, experts, top_k):
    chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).topk(top_k).indices
    order, groups = grouped(chosen, experts)
    return Routes(torch.ones(rows, top_k, device="cuda", dtype=torch.bfloat16), chosen.int().cuda(), order.cuda(),
                  groups.cuda())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rank", "adapters"), [(8, torch.float32), (16, torch.bfloat16), (20, torch.float32),
                                                (3, torch.float32), (64, torch.float32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_weights_are_torchs(dtype, rank, adapters, transposed):
    """Rows of the unit matrix give each of them: where one differs, float32 sums of another order lie about a tie."""
    experts, columns = 8, 512
    weights = weights_of(experts, 256, columns, rank, dtype, adapters, transposed)
    expected, differ = weights.folded().weight, 0.0
    for expert in range(experts):
        chosen = torch.full((columns, 1), expert)
        order, groups = (tensor.cuda() for tensor in grouped(chosen, experts))
        routes = Routes(torch.ones(columns, 1, device="cuda", dtype=dtype), chosen.int().cuda(), order, groups)
        found = down(torch.eye(columns, device="cuda", dtype=dtype)[order.long()], weights, routes)[:, 0]
        wanted = expected[expert] if transposed else expected[expert].T
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=2e-3)
        differ += (found != wanted).float().mean().item() / experts
    assert differ < 1e-3


@pytest.mark.parametrize("gating", [SILU_GATING, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("rows", [1, 3, 8, 64, 256, 2048])
def test_products_are_those_of_folded_weights(rows, gating):
    experts, width, inner = 32, 512, 256
    options = {"transposed": gating.is_interleaved}
    gate_ups = weights_of(experts, 2 * inner, width, 16, **options)
    downs = weights_of(experts, width, inner, 16, **options)
    routes = routes_of(rows, experts, 4)
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to("cuda", torch.bfloat16)
    found = gate_up(hidden, gate_ups, routes, gating)
    expected = gate_up(hidden, gate_ups.folded(), routes, gating)
    assert (found != expected).float().mean() < 0.02
    assert (down(found, downs, routes) != down(found, downs.folded(), routes)).float().mean() < 0.02
    assert (down(found, downs._replace(update=None), routes) != down(found, downs, routes)).float().mean() > 0.9


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_tokens_of_a_model(name, monkeypatch):
    """Of two adapters and after one was trained, in graphs that hold what they read for each."""
    pytest.importorskip("peft", reason="an extra of the test environment")
    from lora_models import randomize, with_expert_adapter

    seen, products = set(), ExpertsParts.products
    monkeypatch.setattr(ExpertsParts, "products",
                        lambda self, hidden, routes: seen.add(len(hidden)) or products(self, hidden, routes))
    wrapped = with_expert_adapter(family_model(name, **SHAPE).to("cuda", torch.bfloat16), scale=0.2)
    with_expert_adapter(wrapped, "second", 6, r=3, scale=0.2)
    inputs = cuda_batch([33, 70, 7])
    changes = {"first": lambda: None, "second": lambda: wrapped.set_adapter("second"),
               "trained": lambda: randomize(wrapped, "second", 9, 0.2), "back": lambda: wrapped.set_adapter("default")}
    found = {}
    for change, run in changes.items():
        run()
        stock = wrapped.generate(**inputs, max_new_tokens=24, **LOGITS)
        hf_paged.enable(wrapped, strict=True, enable_prefix_caching=False)
        for _ in range(3):
            found[change] = wrapped.generate(**inputs, max_new_tokens=24)
            assert_same_but_for_near_ties(found[change], stock)
        assert hf_paged.get_engine(wrapped).stats().num_graphs_captured > 0
        hf_paged.disable(wrapped)
    assert seen & {3, 4}, seen
    assert torch.equal(found["first"], found["back"])
    assert not any(torch.equal(found[a], found[b]) for a, b in (("first", "second"), ("second", "trained")))


@torch.no_grad()
def test_one_engine_follows_its_adapters():
    """Captured graphs read trained tensors in place, and are not replayed for another adapter."""
    pytest.importorskip("peft", reason="an extra of the test environment")
    from lora_models import randomize, with_expert_adapter

    wrapped = with_expert_adapter(family_model("qwen3-moe", **SHAPE).to("cuda", torch.bfloat16), scale=0.2)
    with_expert_adapter(wrapped, "second", 6, r=3, scale=0.2)
    inputs = cuda_batch([33, 70, 7])

    def outputs(**options):
        hf_paged.enable(wrapped, strict=True, enable_prefix_caching=False, **options)
        found = []
        for seed in (5, 9):
            randomize(wrapped, "default", seed, 0.2)
            for name in ("default", "second"):
                wrapped.set_adapter(name)
                found += [wrapped.generate(**inputs, max_new_tokens=16) for _ in range(3)]
        hf_paged.disable(wrapped)
        return found

    found, eager = outputs(), outputs(enforce_eager=True)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    assert torch.equal(found[3], found[9]) and not torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[6])
