"""Routes of completions: the experts that stock's routers choose for the same tokens, however the engine ran them."""

from __future__ import annotations

import pytest
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from outlines import outlined
from recurrent_models import recurrent_model, with_idiom
from support import random_prompts, run_out, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig
from hf_paged.models import experts
from hf_paged.models.routing.record import RouteRecorder, routers_of

GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False)
FAMILIES = ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "gpt-oss", "Olmoe", "DeepseekV3", "MiniMaxM2", "Qwen2Moe"]


def model_of(name, dtype=torch.float32):
    made = derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name)
    made = made.to(dtype)
    return made if name.startswith("qwen3-moe") else outlined(made)


@torch.no_grad()
def stock_routes(model, ids):
    """[tokens, layers, k] of a forward of the model's own, by what its routers return."""
    seen = []
    hooks = [router.register_forward_hook(lambda module, args, result: seen.append(result[2]))
             for router in routers_of(model).values()]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


def run(model, prompts, config=GREEDY, **settings):
    engine = hf_paged.Engine(model, PagedConfig(**{"num_blocks": 64, "routed_experts": True} | settings))
    order = [engine.add_request(prompt, config) for prompt in prompts]
    done = {}
    done |= {output.request_id: output.completion for output in run_out(engine) if output.completion is not None}
    return engine, [done[request] for request in order]


def same_sets(routes, others):
    """Of equal scores torch's `topk` on a CPU and the kernels' references may take the experts in other orders."""
    return torch.equal(routes.long().sort(-1).values, others.long().sort(-1).values)


def assert_routes(model, completion):
    expected = stock_routes(model, completion.prompt_token_ids + completion.token_ids)
    found = completion.routed_experts
    assert found.dtype == torch.int16 and found.device.type == "cpu" and found.shape == expected.shape
    assert (found[-1] == -1).all() and same_sets(found[:-1], expected[:-1])
    assert not same_sets(found[:-2], expected[1:-1])  # routes of neighbours differ: a displaced one would show


@pytest.mark.parametrize("name", FAMILIES)
def test_routes_are_those_of_stocks_routers(name):
    model = model_of(name)
    _, completions = run(model, random_prompts([33, 17, 4]))
    for completion in completions:
        assert_routes(model, completion)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_routes_of_kernels(monkeypatch, name):
    """The references of the kernels choose the experts; steps of many tokens run modules."""
    monkeypatch.setattr(experts, "why_not_on", lambda device: None)
    monkeypatch.setattr(experts, "MAX_ROWS", 20)
    model = model_of(name, torch.bfloat16 if name == "qwen3-moe" else torch.float16)
    expected = [one.routed_experts for one in run(model, random_prompts([33, 4]), fused_experts=False)[1]]
    found = [one.routed_experts for one in run(model, random_prompts([33, 4]))[1]]
    assert all(map(same_sets, found, expected))


def test_routes_under_autocast():
    model = family_model("qwen3-moe")
    with torch.autocast("cpu", torch.bfloat16):
        _, [completion] = run(model, random_prompts([20]))
        assert_routes(model, completion)


def test_chunks_cached_prefixes_and_preemption():
    model = family_model("qwen3-moe")
    prompts = random_prompts([40, 21])
    expected = [one.routed_experts for one in run(model, prompts)[1]]

    def matches(completions):
        return [torch.equal(one.routed_experts, routes) for one, routes in zip(completions, expected, strict=True)]

    assert all(matches(run(model, prompts, max_num_batched_tokens=16, max_num_seqs=16)[1]))
    engine, completions = run(model, [prompts[0], prompts[0], prompts[1]])
    assert all(matches(completions[1:]))
    again = engine.add_request(prompts[0], GREEDY)
    while engine.has_unfinished():
        cached = [one.completion for one in engine.step() if one.completion is not None]
    assert again and cached[0].num_cached_tokens == 32 and torch.equal(cached[0].routed_experts, expected[0])
    long = GenerationConfig(max_new_tokens=30, do_sample=False)
    expected = [one.routed_experts for one in run(model, prompts, long)[1]]
    for settings in ({"enable_prefix_caching": False}, {"overlap": True}):
        engine, completions = run(model, prompts, long, num_blocks=7, **settings)
        assert engine.stats().num_preemptions and all(matches(completions))


def test_a_pool_that_grows_keeps_routes():
    model = family_model("qwen3-moe")
    settings = {"num_blocks": None, "max_num_seqs": 128}
    config = GenerationConfig(max_new_tokens=30, do_sample=False)
    engine, completions = run(model, random_prompts([20] * 40), config, **settings)
    assert engine.stats().num_pool_growths
    assert_routes(model, completions[0])


def test_guessed_tokens_that_are_refused_leave_no_routes():
    model = family_model("qwen3-moe")
    config = GenerationConfig(max_new_tokens=120, do_sample=False, prompt_lookup_num_tokens=4)
    engine, [completion] = run(model, [[7, 8, 9] * 8], config)
    assert engine.stats().num_draft_tokens
    assert_routes(model, completion)


def test_an_aborted_request_has_routes_of_what_was_computed():
    model = family_model("qwen3-moe")
    engine = hf_paged.Engine(model, PagedConfig(num_blocks=64, routed_experts=True))
    request = engine.add_request(random_prompts([20])[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(request)
    [completion] = [output.completion for output in engine.step() if output.completion is not None]
    assert completion.finish_reason == "abort"
    assert_routes(model, completion)
    engine = hf_paged.Engine(model, PagedConfig(num_blocks=64, routed_experts=True, max_num_batched_tokens=16,
                                                max_num_seqs=16))
    request, prompt = engine.add_request(random_prompts([40])[0], GREEDY), random_prompts([40])[0]
    for _ in range(2):
        engine.step()
    engine.abort(request)
    [completion] = [output.completion for output in engine.step() if output.completion is not None]
    assert (completion.routed_experts[32:] == -1).all()
    assert same_sets(completion.routed_experts[:32], stock_routes(model, prompt)[:32])
    waiting = engine.add_request([5, 6, 7], GREEDY)
    engine.abort(waiting)
    [completion] = [output.completion for output in engine.step() if output.completion is not None]
    assert (completion.routed_experts == -1).all() and completion.routed_experts.shape == (3, 2, 2)


def test_slots_displaced_by_a_token_are_noticed(monkeypatch):
    """What the tests above would say of a recorder that writes to the slot behind."""
    record = RouteRecorder.__init__

    def displaced(self, step):
        record(self, step)
        self._slots = self._slots + 1

    monkeypatch.setattr(RouteRecorder, "__init__", displaced)
    model = family_model("qwen3-moe")
    _, [completion] = run(model, random_prompts([20]))
    with pytest.raises(AssertionError):
        assert_routes(model, completion)


def test_without_the_option_nothing_is_kept():
    engine, [completion] = run(family_model("qwen3-moe"), [[5, 6, 7]], routed_experts=False)
    assert completion.routed_experts is None and engine._core.runner.cache.routes is None


@pytest.mark.parametrize(("make", "what"), [
    (tiny_model, "no router of experts"),
    pytest.param(lambda: recurrent_model("Qwen3Next"), "recurrent states", marks=[with_idiom, pytest.mark.slow]),
])
def test_models_without_recorded_routes(make, what):
    with pytest.raises(ValueError, match=f"routed_experts=True: .*{what}"):
        hf_paged.Engine(make(), PagedConfig(routed_experts=True))




def test_routers_that_choose_another_number_of_experts_later():
    model = hf_paged.enable(family_model("qwen3-moe"), routed_experts=True)
    for router in routers_of(model).values():
        router.top_k = 1
    with pytest.warns(hf_paged.FallbackWarning, match="other numbers of experts"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
