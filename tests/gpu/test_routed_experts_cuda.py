"""On a GPU: routes of requests in graphs and beside one another, by kernels and by modules."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from outlines import outlined
from support import random_prompts, run_out
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig
from hf_paged.models.routing.record import routers_of

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
         "max_position_embeddings": 1024}
GREEDY = GenerationConfig(max_new_tokens=40, do_sample=False)


@torch.no_grad()
def stock_routes(model, ids):
    seen = []
    hooks = [router.register_forward_hook(lambda module, args, result: seen.append(result[2]))
             for router in routers_of(model).values()]
    model(torch.tensor([ids], device="cuda"))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).cpu().sort(-1).values


def share(routes, others):
    return (routes.long().sort(-1).values == others).all(-1).float().mean().item()


def run(engine, prompts):
    order = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    done = {}
    done |= {output.request_id: output.completion for output in run_out(engine) if output.completion is not None}
    return [done[request] for request in order]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"fused_experts": False}])
@pytest.mark.parametrize(("name", "dtype"), [
    ("qwen3-moe", torch.bfloat16), ("qwen3-moe", torch.float32), ("mixtral", torch.float16),
    ("gpt-oss", torch.float16)])
def test_routes_are_those_of_stocks_routers(name, dtype, settings):
    """But for near ties, which a step may round otherwise; the pool grows meanwhile, and graphs are captured again."""
    model = family_model(name, **SHAPE).to(dtype)
    if name != "qwen3-moe":
        outlined(model)
    model.cuda()
    engine = hf_paged.Engine(model, PagedConfig(routed_experts=True, **settings))
    prompts = random_prompts([33, 4, 300, 700] * 12)
    completions = run(engine, prompts)
    for completion in completions[:4]:
        expected = stock_routes(model, completion.prompt_token_ids + completion.token_ids)
        found = completion.routed_experts
        assert (found[-1] == -1).all() and (found[:-1] >= 0).all()
        assert share(found[:-1], expected[:-1]) > (0.99 if dtype == torch.float32 else 0.9)
        assert share(found[:-2], expected[1:-1]) < 0.8
    [again] = run(engine, prompts[2:3])
    cached = again.num_cached_tokens
    assert cached >= 288 and torch.equal(again.routed_experts[:cached], completions[2].routed_experts[:cached])
    assert engine.stats().num_pool_growths
    engine.shutdown()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_trainer_replays(is_reentrant):
    """Activations are computed again in threads of the backward pass."""
    model = family_model("qwen3-moe", **SHAPE).cuda().to(torch.bfloat16)
    engine = hf_paged.Engine(model, PagedConfig(routed_experts=True))
    engine.replay_routes()
    [completion] = run(engine, random_prompts([50]))
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids], device="cuda")
    changed = torch.where(completion.routed_experts < 0, -1, (completion.routed_experts + 1) % 8)
    engine._replay.store.keep(ids[0].tolist(), changed.to(torch.int16))
    model.train().gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    seen = []
    for router in routers_of(model).values():
        router.register_forward_hook(lambda module, args, result: seen.append(result[2]))
    model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    assert len(seen) == 4 and engine.stats().num_rows_replayed == 1
    for layer, chosen in ((0, seen[0]), (1, seen[1]), (1, seen[2]), (0, seen[3])):
        assert torch.equal(chosen[:-1].cpu(), changed[:-1, layer].long())
    assert all(router.weight.grad.count_nonzero() for router in routers_of(model).values())
    engine.shutdown()
