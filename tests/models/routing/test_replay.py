"""A trainer's forwards with recorded routes: own ones change nothing, others are kept, and routers learn."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from lora_models import with_adapter
from outlines import outlined
from support import batch, random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig
from hf_paged.models.routing.record import Choice, routers_of
from hf_paged.models.routing.replay import Replay, RouteStore

FAMILIES = ["qwen3-moe", "mixtral", "gpt-oss", "Olmoe", "DeepseekV3", "MiniMaxM2", "Glm4Moe", "GraniteMoe"]


def model_of(name):
    return derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name)


def routes_in(model, inputs):
    """[rows, columns, layers, k] of a plain forward, by what routers return."""
    seen = []
    hooks = [router.register_forward_hook(lambda module, args, result: seen.append(result[2]))
             for router in routers_of(model).values()]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).unflatten(0, inputs["input_ids"].shape).to(torch.int16)


def keep(replay, inputs, routes):
    for ids, mask, one in zip(inputs["input_ids"], inputs["attention_mask"].bool(), routes, strict=True):
        replay.keep(ids[mask].tolist(), one[mask], None)


def others(model, routes):
    """Other routes: each expert's neighbour."""
    return (routes + 1) % len(next(iter(routers_of(model).values())).weight)


def logits_and_gradients(model, inputs):
    model.zero_grad(set_to_none=True)
    logits = model(**inputs).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("name", FAMILIES)
def test_own_routes_change_nothing_and_others_are_kept(name):
    model = model_of(name)
    inputs = batch([19, 7])
    routes = routes_in(model, inputs)
    free = logits_and_gradients(model, inputs)
    replay = Replay(model.model)
    keep(replay, inputs, routes)
    assert_same(logits_and_gradients(model, inputs), free)
    changed = others(model, routes)
    keep(replay, inputs, changed)
    forced = routes_in(model, inputs)
    mask = inputs["attention_mask"].bool()
    assert torch.equal(forced[mask], changed[mask]) and torch.equal(forced[~mask][:, 0], routes[~mask][:, 0])
    logits, gradients = logits_and_gradients(model, inputs)
    assert not torch.equal(logits[mask], free[0][mask])
    assert all(gradients[f"model.{path}.weight"].count_nonzero() for path in routers_of(model.model))
    assert replay.counts == (6, 0)
    replay.remove()
    assert_same(logits_and_gradients(model, inputs), free)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "DeepseekV3"])
def test_activations_that_are_computed_again(name, is_reentrant):
    model = model_of(name).train()
    inputs = batch([19, 7])
    routes = others(model, routes_in(model, inputs))
    replay = Replay(model.model)
    keep(replay, inputs, routes)
    expected = logits_and_gradients(model, inputs)
    calls = []
    gate = next(iter(routers_of(model).values()))
    gate.register_forward_hook(lambda module, args, result: calls.append(result[2]))
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    assert_same(logits_and_gradients(model, inputs), expected)
    assert len(calls) == 2 and torch.equal(*calls)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_loss_beside_the_decoders_result(is_reentrant):
    """Its backward pass begins without the result's hook."""
    model = family_model("qwen3-moe").train()
    inputs = batch([19])
    taken = others(model, routes_in(model, inputs))
    replay = Replay(model.model)
    keep(replay, inputs, taken)

    def gradients():
        model.zero_grad(set_to_none=True)
        model(**inputs, output_hidden_states=True).hidden_states[-2].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    assert all(map(torch.equal, gradients(), expected))


def test_a_backward_pass_that_an_error_ends_leaves_no_routes():
    model = family_model("qwen3-moe")
    inputs = batch([9])
    free = routes_in(model, inputs)
    replay = Replay(model.model)
    keep(replay, inputs, others(model, free))
    logits = model(**inputs).logits
    model.model.embed_tokens.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits.sum().backward()
    replay.store = RouteStore()
    block, hidden = model.model.layers[0].mlp, torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = block(hidden)
        replay.remove()
        assert torch.equal(found, block(hidden))


def test_threads_choose_by_their_own_forwards():
    """One without gradients ends while another one, with routes, is between two layers."""
    model = family_model("qwen3-moe")
    inputs, other = batch([9]), batch([5], seed=3)
    taken = others(model, routes_in(model, inputs))
    replay = Replay(model.model)
    keep(replay, inputs, taken)

    def run_another(*_):
        if threading.current_thread() is threading.main_thread():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", hf_paged.FallbackWarning)
                thread = threading.Thread(target=routes_in, args=(model, other))
                thread.start()
                thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(run_another)
    seen = []
    hooks = [router.register_forward_hook(lambda module, args, result: seen.append(
        (threading.current_thread() is threading.main_thread(), result[2]))) for router in routers_of(model).values()]
    model(**inputs)
    for hook in (handle, *hooks):
        hook.remove()
    mine = torch.stack([experts for is_mine, experts in seen if is_mine], 1)
    assert torch.equal(mine.to(torch.int16), taken.flatten(0, 1)) and len(seen) == 4


def test_an_engine_that_goes_takes_its_hooks_along():
    model = family_model("qwen3-moe")
    engine = hf_paged.Engine(model, PagedConfig(num_blocks=64, routed_experts=True))
    engine.replay_routes()
    assert any(one._forward_hooks for one in model.modules())
    del engine
    gc.collect()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_each_backward_pass_takes_the_routes_of_its_forward(is_reentrant):
    """Two forwards before one backward pass, with the second one's routes, or none, set last."""
    model = family_model("qwen3-moe").train()
    first, second = batch([19]), batch([19], seed=2)
    routes = others(model, routes_in(model, first))
    replay = Replay(model.model)
    keep(replay, first, routes)

    def gradients(*batches):
        model.zero_grad(set_to_none=True)
        losses = [torch.log_softmax(model(**inputs).logits, -1)[..., 3].sum() for inputs in batches]
        with torch.no_grad():
            model(**second)
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters()]

    with pytest.warns(hf_paged.FallbackWarning):
        expected = gradients(first, second)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    found = gradients(first, second)
    assert all(map(torch.equal, found, expected)) and replay.counts == (2, 4)


def test_forwards_without_gradients_leave_no_routes():
    model = family_model("qwen3-moe")
    inputs = batch([19])
    routes = others(model, routes_in(model, inputs))
    replay = Replay(model.model)
    keep(replay, inputs, routes)
    with torch.no_grad():
        model(**inputs)
    assert replay._last is None and replay.counts.num_replayed == 1


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_between_the_passes_of_a_trainer_routers_choose_freely(name):
    """Also behind a forward that an error ends; steps of another engine are no rows of the trainer's."""
    model = model_of(name)
    inputs, prompt = batch([9, 6]), random_prompts([7])
    with hf_paged.PagedGenerator(copy.deepcopy(model)) as generator:
        expected = generator.generate(prompt, GenerationConfig(max_new_tokens=6, do_sample=False))[0].token_ids
    replay = Replay(model.model)
    keep(replay, inputs, others(model, routes_in(model, inputs)))

    def check():
        counts = replay.counts
        with hf_paged.PagedGenerator(model) as generator:
            made = generator.generate(prompt, GenerationConfig(max_new_tokens=6, do_sample=False))[0].token_ids
        assert made == expected and replay.counts == counts

    logits = model(**inputs).logits
    check()
    logits.sum().backward()
    check()
    handle = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        model(**inputs)
    handle.remove()
    check()


def test_truncated_rows_are_found_and_unknown_ones_counted():
    model = family_model("qwen3-moe")
    inputs = batch([19])
    routes = routes_in(model, inputs)
    replay = Replay(model.model)
    keep(replay, inputs, others(model, routes))
    short = {name: value[:, :11] for name, value in inputs.items()}
    assert torch.equal(routes_in(model, short), others(model, routes)[:, :11])
    unknown = batch([9], seed=5)
    with pytest.warns(hf_paged.FallbackWarning, match="routes freely"):
        free = routes_in(model, unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(routes_in(model, unknown), free)
        model(inputs_embeds=torch.zeros(1, 4, 64))
    assert replay.counts == (1, 3)


def test_generation_and_reference_forwards_route_freely():
    model = with_adapter(family_model("qwen3-moe"), targets=["q_proj"])
    inputs = batch([19])
    decoder = model.get_base_model().model
    free = routes_in(model, inputs)
    replay = Replay(decoder)
    keep(replay, inputs, others(model, free))
    with model.disable_adapter():
        reference = routes_in(model, inputs)
    assert not torch.equal(reference, others(model, free)) and replay.counts == (0, 0)
    model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert replay.counts == (0, 0)
    assert torch.equal(routes_in(model, inputs), others(model, free)) and replay.counts == (1, 0)


def test_copies_of_a_model_route_freely():
    model = family_model("qwen3-moe")
    inputs = batch([19])
    free = routes_in(model, inputs)
    replay = Replay(model.model)
    keep(replay, inputs, others(model, free))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(routes_in(twin, inputs), free)
    assert replay.counts == (0, 0)


def test_routes_belong_to_the_adapters_under_which_they_were_taken():
    """A reference model may be another adapter."""
    model = with_adapter(family_model("qwen3-moe"))
    model.add_adapter("other", model.peft_config["default"])
    inputs, decoder = batch([9]), model.get_base_model().model
    taken = others(model, routes_in(model, inputs))
    replay = Replay(decoder)
    keep(replay, inputs, taken)
    assert torch.equal(routes_in(model, inputs), taken) and replay.counts == (1, 0)
    model.set_adapter("other")
    with pytest.warns(hf_paged.FallbackWarning, match="routes freely"):
        free = routes_in(model, inputs)
    assert not torch.equal(free, taken) and replay.counts == (1, 1)
    ids = inputs["input_ids"][0].tolist()
    replay.keep(ids, free[0], "default")
    model.set_adapter("default")
    assert torch.equal(routes_in(model, inputs), free)


def test_routers_that_were_exchanged_or_choose_other_numbers_are_counted():
    model = family_model("qwen3-moe")
    inputs, block = batch([9]), model.model.layers[0].mlp
    taken = others(model, routes_in(model, inputs))
    replay = Replay(model.model)
    keep(replay, inputs, taken)
    own, block.gate = block.gate, copy.deepcopy(block.gate)
    with pytest.warns(hf_paged.FallbackWarning, match="routes freely"):
        model(**inputs)
    block.gate = own
    own.top_k = 1
    model(**inputs)
    assert replay.counts == (0, 2)


def test_a_store_drops_the_oldest():
    store = RouteStore(most_bytes=100)
    routes = torch.zeros(5, 2, 2, dtype=torch.int16)
    for first in (1, 2, 2, 3):
        store.keep([first, 8, 9, 10, 11], routes + first)
    assert store.find(np.array([1, 8])) is None
    assert torch.equal(store.find(np.array([2, 8], np.int64)), routes[:2] + 2)
    assert store.find(np.array([8])) is None


def test_a_choice_looks_at_all_experts_only():
    """Groups of experts are chosen by `topk`, too."""
    router = torch.nn.Linear(4, 2)
    router.top_k = 2
    with Choice(router) as choice:
        torch.topk(torch.zeros(3, 1, 2), 2)
        torch.topk(torch.zeros(3, 2), 1)
        torch.zeros(3, 4).topk(2)
    assert choice.chosen is None
    with Choice(router) as choice:
        torch.topk(input=torch.tensor([[1.0, 2.0]]), k=2)
    assert choice.chosen.tolist() == [[1, 0]]


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_install_replays_the_routes_of_rollouts(name):
    model = model_of(name)
    if name == "mixtral":
        outlined(model)
    prompts = batch([19, 7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_paged.install(replay_routes=True, strict=True, num_blocks=64)
        try:
            made = model.generate(**prompts, max_new_tokens=8, do_sample=False)
            engine = hf_paged.get_engine(model)
            mask = torch.cat([prompts["attention_mask"], torch.ones(2, 8, dtype=torch.int64)], 1)
            inputs = {"input_ids": made, "attention_mask": mask}
            free = routes_in(model, inputs)
            stats = engine.stats()
            assert (stats.num_rows_replayed, stats.num_rows_not_replayed) == (2, 0)
            again = model.generate(**prompts, max_new_tokens=8, do_sample=False)
            assert torch.equal(again, made) and engine.stats().calls["native"].num_calls == 2
            assert engine.stats().num_rows_replayed == 2
            model.train()
            logits, gradients = logits_and_gradients(model, inputs)
            assert engine.stats().num_rows_replayed == 4 and gradients
        finally:
            hf_paged.uninstall()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert torch.equal(routes_in(model, inputs)[mask.bool()], free[mask.bool()])
    assert torch.equal(logits_and_gradients(model, inputs)[0], logits)


def test_install_of_models_without_recorded_routes(monkeypatch):
    hf_paged.install(replay_routes=True)
    try:
        dense, moe = tiny_model(), family_model("qwen3-moe")
        dense.generate(**batch([5]), max_new_tokens=1)
        assert not hf_paged.get_engine(dense).config.routed_experts
        with pytest.raises(ValueError, match="replay_routes: expected an engine with routed_experts=True"):
            hf_paged.get_engine(dense).replay_routes()
        next(iter(routers_of(moe).values())).top_k = 3
        unknown = family_model("qwen3-moe")
        for router in routers_of(unknown).values():
            router.top_k = 2.0
        for model, why in ((moe, "unlike routers"), (unknown, "no router of experts")):
            with pytest.warns(hf_paged.FallbackWarning, match=f"routes are not replayed: .*{why}"), suppress(TypeError):
                model.generate(**batch([5]), max_new_tokens=1)
            assert hf_paged.is_enabled(model)
    finally:
        hf_paged.uninstall()


def test_an_engine_of_ones_own_replays():
    model = family_model("qwen3-moe")
    engine = hf_paged.Engine(model, PagedConfig(num_blocks=64, routed_experts=True))
    engine.replay_routes()
    engine.replay_routes()
    engine.add_request(random_prompts([20])[0], GenerationConfig(max_new_tokens=4, do_sample=False))
    while engine.has_unfinished():
        for output in engine.step():
            completion = output.completion
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    found = routes_in(model, {"input_ids": ids})
    assert torch.equal(found[0, :-1], completion.routed_experts[:-1]) and engine.stats().num_rows_replayed == 1
    engine.shutdown()
