"""Stand-ins of bitsandbytes' 4-bit layers in fused layers: copies in their compute dtype, or as they stand; QLoRA."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from packed_models import Linear4bit, install, qlora, quantize
from support import HostMemory, assert_native_parity, batch, stock_copy, tiny_model
from torch import nn

import hf_paged
from hf_paged.kernels.lora.lora_expand import lora_expand
from hf_paged.models import find_executor, fused, linears
from hf_paged.models.lora import Adapters, find_layers
from hf_paged.models.packed import dequantizing

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def packed(monkeypatch):
    """Stand-ins of bitsandbytes' and PEFT's classes; LoRA by the kernels' references, as on a GPU by kernels."""
    install(monkeypatch)
    monkeypatch.setattr(fused, "reads_tables", lambda device: True)
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)


def copied_bytes(model):
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    return sum(layer.in_features * layer.out_features for layer in layers) * layers[0].compute_dtype.itemsize


@pytest.fixture
def forwards(monkeypatch):
    """The number of times that a 4-bit layer ran."""
    calls = []
    own = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, hidden: (calls.append(self), own(self, hidden))[1])
    return calls


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4bit_layers_run_by_copies(packed, nested, dtype):
    """With the tokens of a model of plain layers with the same weights."""
    model, plain = quantize(tiny_model(**SHAPE).to(dtype), nested, dtype), tiny_model(**SHAPE).to(dtype)
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            plain.get_submodule(name).weight.data = module.dequantized()
    expected = hf_paged.enable(plain, strict=True).generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model, strict=True, dequantize=True)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().shadow_bytes == copied_bytes(model) > 0
    hf_paged.disable(model)
    assert all(type(p).__name__ != "Params4bit" or p.dtype == torch.uint8 for p in model.parameters())


def test_4bit_layers_follow_what_a_trainer_writes(packed):
    """Bytes and scales in place, a weight that was quantized anew."""
    model = quantize(tiny_model(**SHAPE))
    hf_paged.enable(model, strict=True, dequantize=True)
    results = [assert_native_parity(model, **INPUTS, **OPTIONS)]
    layers = model.model.layers[0].mlp

    def check():
        results.append(assert_native_parity(model, stock_copy(model).generate(**INPUTS, **OPTIONS),
                                            **INPUTS, **OPTIONS))
        assert not torch.equal(*results[-2:])
        assert hf_paged.get_engine(model).stats().shadow_bytes == copied_bytes(model)

    layers.up_proj.weight.data.copy_(layers.up_proj.weight.data.flip(0))
    check()
    layers.gate_proj.weight.quant_state.absmax.data.mul_(-3)
    check()
    layers.down_proj.quantize(torch.randn(layers.down_proj.weight.quant_state.shape), nested=True)
    check()


@pytest.mark.parametrize("config", [{"dequantize": False}, {"dequantize": "auto"}])
def test_4bit_layers_run_as_they_stand_without_copies(packed, config, forwards, monkeypatch):
    monkeypatch.setattr(dequantizing, "free_memory", lambda device: 0)
    model = quantize(tiny_model(**SHAPE))
    hf_paged.enable(model, strict=True, **config)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().shadow_bytes == 0
    forwards.clear()
    model.generate(**INPUTS, **OPTIONS)
    assert forwards


@pytest.mark.parametrize("factor", [1.9, 2.1])
def test_copies_may_take_half_of_the_free_memory(packed, factor, monkeypatch):
    model = quantize(tiny_model(**SHAPE))
    monkeypatch.setattr(dequantizing, "free_memory", lambda device: int(copied_bytes(model) * factor))
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().shadow_bytes == (copied_bytes(model) if factor > 2 else 0)


@pytest.mark.parametrize("dequantize", [True, "auto"])
def test_too_little_memory_for_copies(packed, dequantize, monkeypatch):
    class Full:
        def __init__(self, *args):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(linears, "CopiedWeights", Full)
    model = quantize(tiny_model(**SHAPE))
    hf_paged.enable(model, strict=True, dequantize=dequantize)
    if dequantize == "auto":
        assert_native_parity(model, **INPUTS, **OPTIONS)
    else:
        with pytest.raises(torch.OutOfMemoryError, match=r"dequantize=True: .* GiB .* or False"):
            model.generate(**INPUTS, **OPTIONS)


@pytest.mark.parametrize("change", [
    lambda layer: setattr(layer, "compute_dtype", torch.bfloat16),
    lambda layer: layer.register_forward_hook(lambda *args: None),
    lambda layer: setattr(layer.weight.quant_state, "packing_format_for_cpu", True),
    lambda layer: setattr(layer.weight.quant_state, "quant_type", "af4"),
    lambda layer: setattr(layer.weight.quant_state, "blocksize", 48),
], ids=range(5))
def test_what_computes_otherwise_runs_as_it_stands(packed, change):
    layer = Linear4bit(nn.Linear(64, 8))
    assert fused.can_be_copied({"a": (layer,)}, torch.float32)
    change(layer)
    assert not fused.can_be_copied({"a": (layer,)}, torch.float32)


def test_a_patched_class_runs_as_it_stands(packed, forwards):
    assert not fused.can_be_copied({"a": (Linear4bit(nn.Linear(64, 8)),)}, torch.float32)


@pytest.mark.parametrize("dequantize", [True, False])
def test_qlora(packed, dequantize, monkeypatch):
    """Adapters switched, disabled and trained, over copies and over layers as they stand."""
    model = qlora(monkeypatch)
    hf_paged.enable(model, strict=True, dequantize=dequantize)
    results = []
    for name in ("default", "second"):
        model.set_adapter(name)
        results.append(stock_copy(model).generate(**INPUTS, **OPTIONS))
        assert_native_parity(model, results[-1], **INPUTS, **OPTIONS)
    with model.disable_adapter():
        results.append(stock_copy(model).generate(**INPUTS, **OPTIONS))
        assert_native_parity(model, results[-1], **INPUTS, **OPTIONS)
    assert not any(torch.equal(one, two) for one, two in pairwise(results))
    executor = hf_paged.get_engine(model)._core._executor
    assert len(executor._linears.adapters._layers) == 7 * len(executor._layers())
    size = copied_bytes(model) if dequantize else 0
    assert hf_paged.get_engine(model).stats().shadow_bytes == size
    hf_paged.get_engine(model).release_memory()
    assert hf_paged.get_engine(model).stats().shadow_bytes == 0
    assert_native_parity(model, stock_copy(model).generate(**INPUTS, **OPTIONS), **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().shadow_bytes == size


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounds", [False, True])
def test_updates_are_rounded_as_by_pefts_class(packed, autocast, adapters, rounds, monkeypatch):
    """Bit by bit, of whole numbers, whose sums are exact; `lora.Linear` rounds but once if adapters are in float32."""
    generator = torch.Generator().manual_seed(0)

    def whole(shape):
        return torch.randint(-9, 10, shape, generator=generator)

    model = qlora(monkeypatch, torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    if not rounds:
        layer.__class__ = type(layer).__mro__[1]
    for module in (*layer.lora_A.values(), *layer.lora_B.values()):
        module.weight.data = whole(module.weight.shape).to(adapters)
    hidden = whole((7, 64)).bfloat16()
    cast = torch.bfloat16 if autocast else None
    with torch.autocast("cpu", cast, enabled=autocast), torch.no_grad():
        expected, product = layer(hidden), layer.base_layer(hidden)
    found = Adapters([(layer,)], (), cast)
    found.load(torch.device("cpu"))
    delta = found.group((layer,)).delta(hidden, None)
    assert delta.table.rounds_delta == rounds
    once = lora_expand(product.clone(), delta.sums, delta.table._replace(rounds_delta=False), None)
    twice = lora_expand(product.clone(), delta.sums, delta.table._replace(rounds_delta=True), None)
    assert not torch.equal(once, twice)
    is_low = autocast or adapters is torch.bfloat16  # then an update is of 16 bits in any case
    assert torch.equal(expected, twice if rounds or is_low else once)


def test_layers_that_round_differently_are_left_to_peft(packed, monkeypatch):
    attention = qlora(monkeypatch).base_model.model.model.layers[0].self_attn
    group = attention.q_proj, attention.k_proj
    assert len(find_layers([group])) == 2
    attention.q_proj.__class__ = type(attention.q_proj).__mro__[1]
    assert not find_layers([group])
    assert len(find_layers([group[:1], group[1:]])) == 2


def test_under_autocast(packed, monkeypatch):
    """A model whose adapters alone are in float32 runs by copies; with float32 norms 4-bit layers hand on float32."""
    model = qlora(monkeypatch, torch.bfloat16)
    hf_paged.enable(model, strict=True, dequantize=True)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**INPUTS, **OPTIONS)
        assert hf_paged.get_engine(model).stats().shadow_bytes == copied_bytes(model)
        for module in model.modules():
            if "Norm" in type(module).__name__:
                module.float()
        model.generate(**INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().shadow_bytes == 0


def test_what_check_says(packed, monkeypatch):
    def said(model, free=1 << 30, **options):
        monkeypatch.setattr(dequantizing, "free_memory", lambda device: free)
        return find_executor(model)(model, **options).describe_4bit(torch.device("cpu"))

    model = quantize(tiny_model(**SHAPE))
    assert said(tiny_model()) is None
    assert said(model) == "by copies of 0.00 GiB in torch.float32"
    assert said(model, dequantize=False) == "as they stand: dequantize=False"
    assert said(model, 0) == "as they stand: copies of 0.00 GiB exceed half of the 0.00 GiB free"
    assert said(model, 0, dequantize=True) == said(model)
    assert "do not compute in torch.float32" in said(quantize(tiny_model(**SHAPE), compute_dtype=torch.bfloat16))
