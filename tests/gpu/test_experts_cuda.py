"""On a GPU: blocks of experts by kernels beside transformers' own, graphs of them, and calls beside one another."""

from __future__ import annotations

import functools

import pytest
import torch
from family_models import family_model
from support import batch, random_prompts, stock_copy
from transformers import GenerationConfig, LogitsProcessorList, Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import hf_paged
from hf_paged.kernels.experts.down import down
from hf_paged.kernels.experts.gate_up import gate_up
from hf_paged.kernels.experts.join import ExpertOutputs, join_experts, join_experts_add_rms_norm
from hf_paged.kernels.experts.route import RouterRule, RouterWeights, Routes, num_arrivals, ordered, route
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.models.experts import ExpertsParts, new_arrivals, read_experts

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
WIDTH, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B's
ROWS = [1, 3, 8, 64, 256]


def cuda(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def assert_in_order(routes, num_experts):
    """Lines of `groups` without an expert say no more than that."""
    order, groups = ordered(routes.experts, num_experts)
    hit = groups[:, 0] >= 0
    assert torch.equal(routes.order, order) and torch.equal(routes.groups[:, 0], groups[:, 0])
    assert torch.equal(routes.groups[hit], groups[hit])


@functools.cache
def block():
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS,
                            num_experts_per_tok=TOP_K, norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        made = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    g = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=g)
    return made.eval()


def rows_of(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to("cuda", torch.bfloat16)


def parts():
    found = read_experts(block(), "grouped_mm", torch.bfloat16, new_arrivals(torch.device("cuda", 0)))
    assert isinstance(found, ExpertsParts), found
    return found


def routes_of(count, skewed):
    """Routes that are not a router's; skewed: the n-th expert is 1 / n as likely as the first (Zipf)."""
    g = torch.Generator().manual_seed(count)
    likely = 1.0 / torch.arange(1, EXPERTS + 1) if skewed else torch.ones(EXPERTS)
    chosen = torch.multinomial(likely.expand(count, -1), TOP_K, generator=g).cuda()
    scores = torch.rand(count, TOP_K, generator=g).to("cuda", torch.bfloat16)
    return Routes(scores, chosen.int(), *ordered(chosen, EXPERTS))


def exact(hidden, routes):
    """Stock's experts in float64, rounded nowhere."""
    experts = block().experts
    total = torch.zeros(len(hidden), WIDTH, dtype=torch.float64, device="cuda")
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            pairs = routes.order[first : first + count].long()
            rows = pairs // TOP_K
            gate, up = (hidden[rows].double() @ experts.gate_up_proj[expert].double().T).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].double().T
            total.index_add_(0, rows, out * routes.scores.flatten()[pairs, None].double())
    return total


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count", ROWS)
@torch.no_grad()
def test_experts_are_as_near_as_stocks(count, skewed):
    hidden, routes, experts = rows_of(count), routes_of(count, skewed), block().experts
    inner = gate_up(hidden, experts.gate_up_proj, routes)
    found = join_experts(ExpertOutputs(down(inner, experts.down_proj, routes), routes))
    right = exact(hidden, routes)
    stocks = [grouped_mm_experts_forward(experts, hidden, routes.experts.long(), routes.scores)]
    if count <= 8:  # it copies every pair's weights
        stocks.append(batched_mm_experts_forward(experts, hidden, routes.experts.long(), routes.scores))
    scale = right.square().mean().sqrt()
    for stock in stocks:
        assert (found.double() - right).square().mean() <= 1.02 * (stock.double() - right).square().mean()
        assert ((found - stock).abs() <= 2**-7 * stock.abs() + 2**-6 * scale).all()
        print(f"{count} rows: {(found != stock).float().mean():.4f} of outputs differ")


@pytest.mark.parametrize("count", ROWS)
@torch.no_grad()
def test_blocks_choose_stocks_experts(count):
    """But where the logits of two experts, which bf16 rounds, are neighbours."""
    hidden, found = rows_of(count), parts()
    routes = route(hidden, found.router, found.rule, found.arrivals)
    logits, scores, experts = block().gate(hidden)
    same = (routes.experts == experts).all(1)
    print(f"{count} rows: {1 - same.float().mean():.4f} have other experts")
    chosen, stocks = (logits.gather(1, one.long()).float() for one in (routes.experts, experts))
    assert ((chosen - stocks).abs() <= 2**-7 * stocks.abs() + 1e-3).all()
    assert count < 64 or int((~same).sum()) <= 0.2 * count
    assert (routes.scores[same].float() - scores[same].float()).abs().max() <= 2**-7
    assert_in_order(routes, EXPERTS)
    assert not found.arrivals.any()
    for _ in range(20):  # whichever program arrives last
        again = route(hidden, found.router, found.rule, found.arrivals)
        assert all(torch.equal(a, b) for a, b in zip(routes[:3], again[:3], strict=True))
        assert_in_order(again, EXPERTS)


@pytest.mark.parametrize("count", ROWS)
@torch.no_grad()
def test_blocks_beside_stocks(count):
    hidden, residual = rows_of(count), rows_of(count + 1000)[:count]
    weight = torch.rand(WIDTH, device="cuda").to(torch.bfloat16)
    outputs = parts().outputs(hidden, None)
    stock = block()(hidden[None])[0]
    found, (normed, summed) = join_experts(outputs), join_experts_add_rms_norm(outputs, residual, weight, 1e-6)
    close = (found - stock).abs() <= 2**-7 * stock.abs() + 2**-6 * stock.float().square().mean().sqrt()
    assert int((~close.all(1)).sum()) <= max(1, 0.2 * count)  # rows with other experts
    expected = add_rms_norm(found, residual, weight, 1e-6)
    assert torch.equal(normed, expected[0]) and torch.equal(summed, expected[1])


KINDS = [
    (RouterRule("softmax", 8, norm=True), 128), (RouterRule("softmax", 10, norm=True, keeps_float32=True), 512),
    (RouterRule("topk_softmax", 4), 32), (RouterRule("sigmoid", 8, norm=True, scaling=2.5), 160),
    (RouterRule("sigmoid", 8, norm=True, scaling=2.5, num_groups=8, topk_group=4), 256),
]


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize(("spec", "experts"), KINDS)
@torch.no_grad()
def test_routers_of_every_kind(spec, experts, count):
    """Weights that repeat have equal logits: of these the first are chosen."""
    g = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(experts // 2, WIDTH, device="cuda", generator=g).mul_(WIDTH**-0.5).to(torch.bfloat16)
    router = RouterWeights(weight.repeat_interleave(2, 0))
    arrivals = torch.zeros(num_arrivals(), dtype=torch.int32, device="cuda")
    found = route(rows_of(count), router, spec, arrivals)
    pairs = found.experts.view(count, -1, 2)
    assert torch.equal(pairs[..., 1], pairs[..., 0] + 1)
    assert not (pairs[..., 0] % 2).any()
    logits = rows_of(count).float() @ router.weight.float().T
    chosen, best = logits.gather(1, found.experts.long()), logits.topk(spec.top_k)[0]
    if spec.num_groups == 1:
        assert (chosen - best).abs().max() < 0.05
    assert_in_order(found, experts)
    assert all(len(set(row)) == spec.top_k for row in found.experts.tolist())


@pytest.mark.parametrize("experts", [16, 64, 128, 512])
@pytest.mark.parametrize("count", [1, 8, 256, 4096])
def test_torch_takes_the_first_of_equal_values(count, experts):
    """What the router's kernel imitates: torch promises no order, so another version may have another."""
    g = torch.Generator("cuda").manual_seed(count)
    values = torch.randint(0, 6, (count, experts), device="cuda", generator=g).float()
    expected = values.sort(dim=-1, descending=True, stable=True)[1][:, :8]
    assert torch.equal(values.topk(8, dim=-1)[1].sort(-1)[0], expected.sort(-1)[0])


@torch.no_grad()
def test_three_rows_in_a_graph_of_four():
    """The padding row has no experts; a replay follows the lengths as they are then."""
    hidden, lengths, found = rows_of(4), torch.tensor([5, 1, 9, 0], dtype=torch.int32, device="cuda"), parts()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.outputs(hidden, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = found.outputs(hidden, lengths)
        joined = join_experts(outputs)
    for real in ([0, 1, 2], [0, 1, 2, 3], [2]):
        lengths.zero_()
        lengths[real] = 7
        graph.replay()
        torch.cuda.synchronize()
        assert int(outputs.routes.groups[:, 2][outputs.routes.groups[:, 0] >= 0].sum()) == TOP_K * len(real)
        others = [row for row in range(4) if row not in real]
        assert (outputs.routes.experts[others] == -1).all() and not joined[others].any()
        alone = join_experts(found.outputs(hidden, None))
        assert torch.equal(joined[real], alone[real])
        assert not found.arrivals.any()


@torch.no_grad()
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_a_model(enforce_eager):
    """The same in each run, as graphs hold them and without, and among the best of the model by its own modules."""
    model = family_model("qwen3-moe", **SHAPE).to("cuda", torch.bfloat16)
    stock, lengths = stock_copy(model), [33, 70, 7]
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager, enable_prefix_caching=False)
    outputs = [model.generate(**cuda(batch(lengths)), max_new_tokens=24) for _ in range(3)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert (hf_paged.get_engine(model).stats().num_graphs_captured > 0) is not enforce_eager
    hf_paged.disable(model)
    below = []
    for row, length in zip(outputs[0], lengths, strict=True):
        tokens = row[70 - length :]
        logits = stock(tokens[None, :-1]).logits[0, length - 1 :].float()
        chosen = logits.gather(1, tokens[length:, None])[:, 0]
        below += ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()
    assert max(below) < 0.5
    assert sum(gap > 0 for gap in below) < len(below) / 4


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral"])
def test_lockstep_calls_change_nothing_of_the_model(variant, num_beams):
    """Stock's loop decodes with another implementation of experts off a CPU: nothing is computed anew."""
    model = family_model(variant, **SHAPE).to("cuda", torch.bfloat16)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=False))
    prompts, names = random_prompts([60, 40], seed=8), []

    def processor(input_ids, scores):
        names.append(model.config._experts_implementation)
        engine.step()
        return scores

    for prompt in prompts:
        engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
    for _ in range(3):
        model.generate(**cuda(batch([20, 13])), max_new_tokens=4, num_beams=num_beams, do_sample=False,
                       logits_processor=LogitsProcessorList([processor]))
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert set(names) == {"grouped_mm"}
    assert stats.weights_version == 0
    assert stats.num_prefill_tokens <= 60 + 40 + 3 * (20 + 13)
    hf_paged.disable(model)
