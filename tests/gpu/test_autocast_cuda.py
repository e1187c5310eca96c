"""On a GPU: calls under autocast, in graphs and eagerly, and the memory and renewal of what they compute with."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from family_models import family_model
from on_gpu import cuda_batch
from support import assert_native_parity, assert_same_tensor, random_prompts, stock_copy, tiny_model

import hf_paged
from hf_paged import PagedGenerator

pytestmark = pytest.mark.gpu
# Head sizes that the Triton kernels take; margins stay wide (support.tiny_model).
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128}
OPTIONS = {"max_new_tokens": 24}
LOWER = [torch.bfloat16, torch.float16]


def on_gpu(dtype=torch.float32, **overrides):
    return tiny_model(**(SHAPE | overrides)).to("cuda", dtype)


@pytest.mark.parametrize("config", [{}, {"enforce_eager": True}, {"fused_kernels": False}, {"merge_weights": False},
                                    {"enable_prefix_caching": False}])
@pytest.mark.parametrize("cast", LOWER)
def test_log_probabilities_are_no_further_from_full_precision_than_stocks(cast, config):
    """Under whatever way of computing: prompts, and steps of one token, of which graphs are made."""
    given = random_prompts([150, 61, 33], seed=3)
    model, exact = on_gpu(), on_gpu()
    stock = copy.deepcopy(model)
    errors = {"stock": [], "ours": []}
    with torch.autocast("cuda", cast), PagedGenerator(model, num_blocks=200, **config) as generator:
        found = generator.generate(given, max_new_tokens=20, logprobs=True, prompt_logprobs=True)
        assert generator.engine.stats().shadow_bytes > 0
    for prompt, completion in zip(given, found, strict=True):
        ids = torch.tensor([prompt + completion.token_ids], device="cuda")
        with torch.no_grad():
            wanted = scored(exact(ids).logits, ids)
            with torch.autocast("cuda", cast):
                errors["stock"].append((scored(stock(ids).logits, ids) - wanted).abs())
        ours = torch.tensor(completion.prompt_logprobs[1:] + completion.logprobs, device="cuda")
        errors["ours"].append((ours - wanted).abs())
    mean = {name: torch.cat(parts).mean().item() for name, parts in errors.items()}
    assert mean["stock"] > 1e-5
    assert mean["ours"] <= 1.1 * mean["stock"]


def scored(logits, ids):
    return logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("caching", [True, False])
def test_weights_that_a_fused_optimizer_writes_are_noticed_on_the_device(caching):
    """Copies, and graphs over them, follow; no counter of the parameters moves."""
    model = hf_paged.enable(on_gpu(), strict=True, enable_prefix_caching=caching)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    engine, inputs, seen = hf_paged.get_engine(model), cuda_batch([50, 20]), []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            seen.append(model.generate(**inputs, **OPTIONS))
            loss = model(input_ids=inputs["input_ids"], labels=inputs["input_ids"]).loss
        copies = [tensor.clone() for tensor in engine._executor.own_tensors()]
        for copied, name in zip(copies[:2], ("qkv", "o_proj"), strict=False):
            assert copied.dtype is torch.bfloat16, name
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(seen[0], seen[1])
    with torch.autocast("cuda", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    attention = model.model.layers[0].self_attn
    merged = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(engine._executor._linears.copied.by_name["0.qkv"].weight, merged.bfloat16())
    assert torch.equal(engine._executor._linears.copied.by_name["lm_head"].weight, model.lm_head.weight.bfloat16())


def test_unchanged_weights_are_not_copied_again():
    model = hf_paged.enable(on_gpu(), strict=True)
    executor, inputs = hf_paged.get_engine(model)._executor, cuda_batch([30])
    with torch.autocast("cuda", torch.bfloat16):
        first = model.generate(**inputs, **OPTIONS)
        copied = executor._linears.copied.by_name["lm_head"].weight
        copied.zero_()  # would be made good by a renewal
        second = model.generate(**inputs, **OPTIONS)
        assert not copied.any()
        model.lm_head.weight.data.view(-1)[0] += 1
        model.generate(**inputs, **OPTIONS)
        assert copied.any()
    assert first.shape == second.shape


def test_calls_in_turn_with_and_without_autocast():
    model = hf_paged.enable(on_gpu(), strict=True)
    stock, inputs = stock_copy(model), cuda_batch([40])
    for cast in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", cast or torch.bfloat16, enabled=cast is not None):
            expected = stock.generate(**inputs, max_new_tokens=6)
            assert_native_parity(model, expected, **inputs, max_new_tokens=6)


@pytest.mark.parametrize("variant", ["gemma3", "qwen3-moe", "gpt-oss"])
def test_modules_that_are_called_as_they_stand(variant):
    stock, model = family_model(variant).cuda(), hf_paged.enable(family_model(variant).cuda(), strict=True)
    inputs = cuda_batch([40])
    for _ in range(2):  # the second replays graphs
        with torch.autocast("cuda", torch.bfloat16):
            expected = stock.generate(**inputs, max_new_tokens=4, pad_token_id=0)
            assert_same_tensor(model.generate(**inputs, max_new_tokens=4, pad_token_id=0), expected)


def test_memory_is_given_back():
    model = on_gpu(hidden_size=512, intermediate_size=2048)
    gc.collect()
    torch.cuda.empty_cache()
    inputs = cuda_batch([40])
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that a product ever ran on
    before = torch.cuda.memory_allocated()
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    with torch.autocast("cuda", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    assert engine.stats().shadow_bytes > 1 << 20
    engine.release_memory()
    assert engine.stats().shadow_bytes == 0
    captured = engine.stats().num_graphs_captured
    with torch.autocast("cuda", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    assert engine.stats().num_graphs_captured == captured > 0, "captured anew"
    engine.release_memory(graphs=True)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_a_renewal_waits_for_nothing():
    """A kernel that runs for long is still at work when the renewal has been enqueued."""
    model = hf_paged.enable(on_gpu(), strict=True)
    executor, inputs = hf_paged.get_engine(model)._executor, cuda_batch([30])
    with torch.autocast("cuda", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    checksum = torch.zeros(1, dtype=torch.int64, device="cuda")
    executor.refresh(checksum)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # clock cycles: longer than a loaded host needs for what follows
    done = torch.cuda.Event()
    executor.refresh(checksum)
    executor.refresh(None)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
