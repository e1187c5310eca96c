"""4-bit layers whose bytes kernels read, in fused layers: here by the kernels' reference; QLoRA around them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from packed_models import Linear4bit, Params4bit, QuantState, install, qlora, quantize
from support import HostMemory, assert_native_parity, batch, run_out, stock_copy, tiny_model
from torch import nn
from transformers import GenerationConfig

import hf_paged
from hf_paged.kernels.layer.linear_4bit import Packed4BitGroup
from hf_paged.models import find_executor, fused, linears
from hf_paged.models.packed import dequantizing
from hf_paged.runner.weights import WeightsGuard

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Stand-ins of bitsandbytes' and PEFT's classes, and what kernels do, as on a GPU; 4-bit layers may not run."""
    install(monkeypatch)
    monkeypatch.setattr(fused, "reads_tables", lambda device: True)
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    for where in (fused, dequantizing):
        monkeypatch.setattr(where, "reads_packed", lambda device, dtype: True)


@pytest.fixture
def forwards(monkeypatch):
    """The 4-bit layers that ran."""
    calls, own = [], Linear4bit.dequantized
    monkeypatch.setattr(Linear4bit, "dequantized", lambda self: (calls.append(self), own(self))[1])
    return calls


def executor_of(model):
    return hf_paged.get_engine(model)._core._executor


def groups_of(model):
    return executor_of(model)._linears._packed


def scratch_bytes(model):
    return hf_paged.get_engine(model).stats().shadow_bytes


def biased(model):
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(layer.self_attn, name)
            linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    return model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_tokens_are_stocks_and_memory_is_a_scratch(nested, has_biases):
    model = tiny_model(**SHAPE)
    model = quantize(biased(model) if has_biases else model, nested)
    hf_paged.enable(model, strict=True, dequantize=False)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    found = groups_of(model)
    assert len(found) == 4 * len(executor_of(model)._layers())
    assert [len(group.weights) for group in list(found.values())[:4]] == [3, 1, 2, 1]
    assert scratch_bytes(model) == 2 * 64 * 128 * 4  # gate and up, in float32
    hf_paged.get_engine(model).release_memory()
    assert scratch_bytes(model) == 0 and not groups_of(model)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    assert scratch_bytes(model) > 0
    hf_paged.disable(model)


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_copies_are_made_where_memory_allows_them(free, monkeypatch):
    monkeypatch.setattr(dequantizing, "free_memory", lambda device: free)
    model = quantize(tiny_model(**SHAPE))
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    assert bool(groups_of(model)) == (not free)


def test_what_was_decided_stays_so_when_calls_with_other_copies_alternate(monkeypatch):
    """Copies themselves change what is free."""
    monkeypatch.setattr(dequantizing, "free_memory", lambda device: 1 << 30)
    model = quantize(tiny_model(**SHAPE).bfloat16(), compute_dtype=torch.bfloat16)
    model.lm_head = nn.Linear(64, model.config.vocab_size, bias=False)  # in float32: copied under autocast alone
    executor = find_executor(model)(model)

    def copies(autocast):
        executor.autocast = autocast
        return bool(executor._plan_weights().packed), bool(executor._plan_weights().copied)

    assert copies(None) == (False, True)
    monkeypatch.setattr(dequantizing, "free_memory", lambda device: 0)
    assert copies(torch.bfloat16) == (True, True)  # the head
    assert copies(None) == (False, True)


def test_layers_follow_what_a_trainer_writes():
    """Bytes and scales in place and anew, a weight that was quantized anew, a new bias."""
    model = quantize(biased(tiny_model(**SHAPE)))
    hf_paged.enable(model, strict=True, dequantize=False)
    results = [assert_native_parity(model, **INPUTS, **OPTIONS)]
    mlp, attention = model.model.layers[0].mlp, model.model.layers[1].self_attn

    def check():
        results.append(assert_native_parity(model, stock_copy(model).generate(**INPUTS, **OPTIONS),
                                            **INPUTS, **OPTIONS))
        assert not torch.equal(*results[-2:])

    mlp.up_proj.weight.data.copy_(mlp.up_proj.weight.data.flip(0))
    check()
    mlp.gate_proj.weight.quant_state.absmax.data.mul_(-3)
    check()
    state = mlp.up_proj.weight.quant_state
    state.absmax = -2 * state.absmax
    check()
    mlp.down_proj.quantize(torch.randn(mlp.down_proj.weight.quant_state.shape), nested=True)
    check()
    attention.q_proj.bias = nn.Parameter(-9 * attention.q_proj.bias.detach())
    check()


@pytest.mark.parametrize("dequantize", [True, False])
def test_scales_that_only_the_layer_has_are_followed_behind_its_forward(dequantize, monkeypatch):
    """As bitsandbytes does it: a weight that lost them (in FSDP) gets them from the layer."""
    own = Linear4bit.dequantized
    monkeypatch.setattr(Params4bit, "quant_state", None, raising=False)

    def dequantized(self):
        if self.weight.quant_state is None:
            self.weight.quant_state = self.quant_state
        return own(self)

    monkeypatch.setattr(Linear4bit, "dequantized", dequantized)
    model = quantize(tiny_model(**SHAPE))
    up = model.model.layers[0].mlp.up_proj
    up.quant_state = vars(up.weight).pop("quant_state")
    hf_paged.enable(model, strict=True, dequantize=dequantize)
    results = [assert_native_parity(model, **INPUTS, **OPTIONS)]
    for change in (lambda: setattr(up.quant_state, "absmax", -3 * up.quant_state.absmax),
                   lambda: up.quant_state.absmax.data.mul_(-2)):
        change()
        results.append(assert_native_parity(model, stock_copy(model).generate(**INPUTS, **OPTIONS),
                                            **INPUTS, **OPTIONS))
        assert not torch.equal(*results[-2:])
    runs_at_once = "0.mlp" in (executor_of(model)._linears.copies() if dequantize else groups_of(model))
    assert runs_at_once


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("change", [lambda state: setattr(state, "absmax", -3 * state.absmax),
                                    lambda state: state.absmax.mul_(-3)], ids=["anew", "in place"])
def test_scales_that_a_streamer_writes_count_from_the_next_token_on(change, dequantize):
    class Streamer:
        def __init__(self, model):
            self.model, self.count = model, 0

        def put(self, tokens):
            self.count += 1
            for layer in self.model.model.layers if self.count == 4 else ():
                change(layer.mlp.up_proj.weight.quant_state)

        def end(self):
            pass

    model, prompt = quantize(tiny_model(**SHAPE)), INPUTS["input_ids"][:1]
    stock, options = stock_copy(model), {"max_new_tokens": 16, "eos_token_id": None}
    before, expected = stock.generate(prompt, **options), stock.generate(prompt, streamer=Streamer(stock), **options)
    hf_paged.enable(model, strict=True, dequantize=dequantize)
    assert torch.equal(model.generate(prompt, streamer=Streamer(model), **options), expected)
    assert not torch.equal(before, expected)


@pytest.mark.parametrize("change", [
    lambda layer: layer.register_forward_hook(lambda *args: None),
    lambda layer: setattr(layer, "compute_dtype", torch.bfloat16),
    lambda layer: setattr(layer.weight.quant_state, "blocksize", 16),
    lambda layer: setattr(layer, "bias", nn.Parameter(torch.zeros(layer.out_features))),
    lambda layer: setattr(layer.weight.quant_state, "absmax", layer.weight.quant_state.absmax.double()),
    lambda layer: setattr(layer.weight, "quant_state", QuantState(
        layer.weight.quant_state.absmax[::2].clone(), layer.weight.quant_state.code, 64, shape=torch.Size((32, 64)),
        dtype=torch.float32, quant_type="nf4")),
], ids=["hook", "compute dtype", "small blocks", "one bias", "double scales", "other blocks"])
def test_a_group_with_a_layer_of_another_kind_runs_as_it_stands(change):
    model = quantize(tiny_model(**SHAPE))
    change(model.model.layers[0].self_attn.k_proj)
    groups = find_executor(model)(model, dequantize=False)
    groups._read_linears()
    assert "0.qkv" not in groups._plan_weights().packed
    assert "1.qkv" in groups._plan_weights().packed and "0.o_proj" in groups._plan_weights().packed


def test_a_hook_that_comes_later_runs_its_layer(forwards):
    model = quantize(tiny_model(**SHAPE))
    hf_paged.enable(model, dequantize=False)
    model.generate(**INPUTS, **OPTIONS)
    assert not forwards
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = layer.forward
    model.generate(**INPUTS, **OPTIONS)
    assert layer in forwards


def test_the_scratch_follows_the_weights_to_another_device():
    model = quantize(tiny_model(**SHAPE))
    executor = find_executor(model)(model, dequantize=False)
    executor._read_linears()
    plan = executor._plan_weights()
    executor._linears.make(plan)
    assert executor._linears.is_made(plan) and executor._linears.copied.scratch.device.type == "cpu"
    for linears_of_group in plan.packed.values():
        for linear in linears_of_group:
            linear.weight = Params4bit(linear.weight.data.to("meta"), requires_grad=False)
    assert not executor._linears.is_made(plan)
    executor._linears.make(plan)
    assert executor._linears.copied.scratch.device.type == "meta"


def test_requests_that_arrive_in_between_cost_no_checksum(monkeypatch):
    """Nothing is copied that it could save renewing."""
    model = quantize(tiny_model(**SHAPE))
    engine = hf_paged.get_engine(hf_paged.enable(model, dequantize=False, enable_prefix_caching=False))
    taken, own = [], WeightsGuard.fresh
    monkeypatch.setattr(WeightsGuard, "fresh", lambda self: (taken.append(self), own(self))[1])
    for _ in range(3):
        engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=9, eos_token_id=None))
        engine.step()
    run_out(engine)
    assert groups_of(model) and not taken


@pytest.mark.parametrize("autocast", [False, True])
def test_qlora(autocast, forwards, monkeypatch):
    """Adapters switched and disabled; no 4-bit layer and none of PEFT's runs."""
    dtype = torch.bfloat16 if autocast else torch.float32
    model = qlora(monkeypatch, dtype)
    hf_paged.enable(model, strict=True, dequantize=False)
    results = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for name in ("default", "second"):
            model.set_adapter(name)
            expected = stock_copy(model).generate(**INPUTS, **OPTIONS)
            forwards.clear()
            results.append(model.generate(**INPUTS, **OPTIONS))
            assert not forwards and (autocast or torch.equal(results[-1], expected))
        with model.disable_adapter():
            results.append(model.generate(**INPUTS, **OPTIONS))
    assert not any(torch.equal(one, two) for one, two in pairwise(results))
    assert len(executor_of(model)._linears.adapters._layers) == 7 * len(executor_of(model)._layers())
    assert isinstance(executor_of(model)._layer_parts[0].qkv.weight, Packed4BitGroup)


def test_under_autocast_layers_of_another_kind_leave_all_to_modules(forwards, monkeypatch):
    model = qlora(monkeypatch, torch.bfloat16)
    layer = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    layer.weight.quant_state.blocksize = 16
    hf_paged.enable(model, dequantize=False)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**INPUTS, **OPTIONS)
    assert len(set(forwards)) == 7 * len(executor_of(model)._layers()) and scratch_bytes(model) == 0


def test_what_check_says(monkeypatch):
    def said(free=1 << 30, **options):
        monkeypatch.setattr(dequantizing, "free_memory", lambda device: free)
        return find_executor(model)(model, **options).describe_4bit(torch.device("cpu"))

    model = quantize(tiny_model(**SHAPE))
    assert said() == "by copies of 0.00 GiB in torch.float32"
    assert said(dequantize=False) == "by kernels that read their bytes: dequantize=False"
    assert said(0) == "by kernels that read their bytes: copies of 0.00 GiB exceed half of the 0.00 GiB free"
