"""On a GPU: blocks of experts by kernels beside transformers' own, graphs of them, and calls beside one another."""

from __future__ import annotations

import functools

import pytest
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from on_gpu import assert_logits_are_as_near_as_stocks, cuda_batch
from support import random_prompts, run_out, stock_copy
from transformers import GenerationConfig, GptOssConfig, LogitsProcessorList, Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import hf_paged
from hf_paged.kernels.experts.join import join_experts, join_experts_add_rms_norm
from hf_paged.kernels.experts.route import RouterRule, RouterWeights, Routes, grouped, new_arrivals, route
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.models.experts import ExpertsParts, read_experts

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
WIDTH, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B's
ROWS = [1, 2, 3, 8, 64, 256]
MANY_ROWS = [300, 2048]


def assert_in_order(routes, num_experts):
    """Lines of `groups` without an expert say no more than that."""
    order, groups = grouped(routes.experts, num_experts)
    hit = groups[:, 0] >= 0
    assert torch.equal(routes.order, order) and torch.equal(routes.groups[:, 0], groups[:, 0])
    assert torch.equal(routes.groups[hit], groups[hit])


@functools.cache
def block(name="qwen3-moe"):
    """Random blocks of Qwen3-30B-A3B's and gpt-oss-20b's shapes."""
    if name == "qwen3-moe":
        config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS,
                                num_experts_per_tok=TOP_K, norm_topk_prob=True)
    else:
        config = GptOssConfig(hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4)
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        made = (Qwen3MoeSparseMoeBlock if name == "qwen3-moe" else GptOssMLP)(config).to(torch.bfloat16)
    g = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            # Weights [E, K, N] or [E, N, K]; large enough that gates and ups are clamped.
            parameter.normal_(0.0, 2.0 * config.hidden_size**-0.5, generator=g)
    return made.eval()


def rows_of(count, width=WIDTH):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to("cuda", torch.bfloat16)


def parts(name="qwen3-moe"):
    found = read_experts(block(name), "grouped_mm", torch.bfloat16, new_arrivals(torch.device("cuda", 0)))
    assert isinstance(found, ExpertsParts), found
    return found


def routes_of(count, skewed, experts=EXPERTS, top_k=TOP_K):
    """Routes that are not a router's; skewed: the n-th expert is 1 / n as likely as the first (Zipf)."""
    g = torch.Generator().manual_seed(count)
    likely = 1.0 / torch.arange(1, experts + 1) if skewed else torch.ones(experts)
    chosen = torch.multinomial(likely.expand(count, -1), top_k, generator=g).cuda()
    scores = torch.rand(count, top_k, generator=g).to("cuda", torch.bfloat16)
    return Routes(scores, chosen.int(), *grouped(chosen, experts))


def exact(found, hidden, routes):
    """Stock's experts in float64, rounded nowhere."""
    total = torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            pairs = routes.order[first : first + count].long()
            rows = pairs // routes.experts.shape[1]
            inner = found.gating(_double(found.gate_up).product(hidden[rows].double(), expert))
            out = _double(found.down).product(inner, expert)
            total.index_add_(0, rows, out * routes.scores.flatten()[pairs, None].double())
    return total


def _double(weights):
    bias = None if weights.bias is None else weights.bias.double()
    return weights._replace(weight=weights.weight.double(), bias=bias)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count", [*ROWS, *MANY_ROWS])
@torch.no_grad()
def test_experts_are_as_near_as_stocks(count, skewed, name):
    found_parts, experts = parts(name), block(name).experts
    hidden = rows_of(count, found_parts.router.weight.shape[1])
    routes = routes_of(count, skewed, len(found_parts.router.weight), found_parts.rule.top_k)
    found = join_experts(found_parts.products(hidden, routes))
    right = exact(found_parts, hidden, routes)
    stocks = [grouped_mm_experts_forward(experts, hidden, routes.experts.long(), routes.scores)]
    if count <= 8:  # it copies every pair's weights
        stocks.append(batched_mm_experts_forward(experts, hidden, routes.experts.long(), routes.scores))
    scale = right.square().mean().sqrt()
    for stock in stocks:
        print(f"{name}, {count} rows: {(found != stock).float().mean():.4f} of outputs differ")
        assert (found.double() - right).square().mean() <= 1.02 * (stock.double() - right).square().mean()
        assert ((found - stock).abs() <= 2**-7 * stock.abs() + 2**-6 * scale).all()


@pytest.mark.parametrize("count", [*ROWS, *MANY_ROWS])
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
    assert count < 64 or int((~same).sum()) <= 0.25 * count
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
    (RouterRule("softmax", 2, norm=True, keeps_float32=True), 8), (RouterRule("topk_softmax", 4), 32),
    (RouterRule("sigmoid", 8, norm=True), 160),
    (RouterRule("sigmoid", 8, norm=True, exact_logits=True, epsilon=1e-20, scaling=2.5), 160),
    (RouterRule("sigmoid", 8, norm=True, exact_logits=True, epsilon=1e-20, scaling=2.5, num_groups=8, topk_group=4),
     256),
]


@pytest.mark.parametrize("count", [*ROWS, *MANY_ROWS])
@pytest.mark.parametrize(("spec", "experts"), KINDS)
@torch.no_grad()
def test_routers_of_every_kind(spec, experts, count):
    """Weights that repeat have equal logits: of these the first are chosen."""
    g = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(experts // 2, WIDTH, device="cuda", generator=g).mul_(WIDTH**-0.5).to(torch.bfloat16)
    router = RouterWeights(weight.repeat_interleave(2, 0))
    arrivals = new_arrivals(torch.device("cuda", 0))
    found = route(rows_of(count), router, spec, arrivals)
    again = route(rows_of(count), router, spec, arrivals)
    assert torch.equal(found.experts, again.experts) and torch.equal(found.scores, again.scores)
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


MODELS = ["qwen3-moe", "mixtral", "gpt-oss", "Olmoe", "DeepseekV3", "MiniMaxM2", "Qwen2Moe"]


def model_of(name):
    """A model of a class that runs by its modules, but for Qwen3-MoE; DeepSeek's correction stays float32."""
    model = derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name, **SHAPE)
    model = model.to("cuda", torch.bfloat16)
    for module in model.modules():
        if name == "DeepseekV3" and "e_score_correction_bias" in module._buffers:
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_a_model(enforce_eager, name, monkeypatch):
    """The same in each run, as graphs hold them and without, with logits as near to float32's as those of stock."""
    model, seen, products = model_of(name), set(), ExpertsParts.products
    monkeypatch.setattr(ExpertsParts, "products",
                        lambda self, hidden, routes: seen.add(len(hidden)) or products(self, hidden, routes))
    stock, right, lengths = stock_copy(model), stock_copy(model).float(), [33, 70, 7]
    options = {"max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True}
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager, enable_prefix_caching=False)
    outputs = [model.generate(**cuda_batch(lengths), **options) for _ in range(3)]
    assert all(torch.equal(outputs[0].sequences, other.sequences) for other in outputs[1:])
    assert (hf_paged.get_engine(model).stats().num_graphs_captured > 0) is not enforce_eager
    assert seen & {110, 112, 128} and seen & {3, 4}, seen
    hf_paged.disable(model)
    assert_logits_are_as_near_as_stocks(name, outputs[0], lengths, right, stock, most=1.5)


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
        model.generate(**cuda_batch([20, 13]), max_new_tokens=4, num_beams=num_beams, do_sample=False,
                       logits_processor=LogitsProcessorList([processor]))
    run_out(engine)
    stats = engine.stats()
    assert set(names) == {"grouped_mm"}
    assert stats.weights_version == 0
    assert stats.num_prefill_tokens <= 60 + 40 + 3 * (20 + 13)
    hf_paged.disable(model)
