"""On a GPU: stand-ins of bitsandbytes' 4-bit layers whose bytes kernels read, in graphs, in prompts and under LoRA."""

from __future__ import annotations

import pytest
import torch
from packed_models import Linear4bit, QuantState, install, qlora, quantize
from support import assert_native_parity, batch, random_prompts, stock_copy, tiny_model

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.kernels.build import kernel_log
from hf_paged.kernels.layer.linear_4bit import Packed4BitGroup

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
OPTIONS = {"max_new_tokens": 24}
LENGTHS = [150, 61, 33, 9]  # by pieces in the scratch, and by the kernel


def to_gpu(model):
    """Move a model, and the scales of its 4-bit layers."""
    def move(state):
        for name, value in vars(state).items():
            if isinstance(value, torch.Tensor):
                setattr(state, name, value.cuda())
            elif isinstance(value, QuantState):
                move(value)

    for module in model.modules():
        if isinstance(module, Linear4bit):
            state = module.weight.quant_state
            move(state)
    model.cuda()
    assert all(hasattr(m.weight, "quant_state") for m in model.modules() if isinstance(m, Linear4bit))
    return model


def prompts(lengths=LENGTHS):
    return {name: tensor.cuda() for name, tensor in batch(lengths).items()}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    install(monkeypatch)


def weight_of(model):
    return hf_paged.get_engine(model)._core._executor._layer_parts[0].qkv.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_tokens_are_stocks(dtype, nested):
    model = to_gpu(quantize(tiny_model(**SHAPE).to(dtype), nested, dtype))
    hf_paged.enable(model, strict=True, dequantize=False)
    for _ in range(3):
        assert_native_parity(model, **prompts(), **OPTIONS)
    stats = hf_paged.get_engine(model).stats()
    assert isinstance(weight_of(model), Packed4BitGroup)
    assert stats.num_graphs_captured > 0 and stats.shadow_bytes == 2 * 128 * 256 * 2
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.quant_state.absmax.copy_(layer.weight.quant_state.absmax.flip(0))
    assert_native_parity(model, stock_copy(model).generate(**prompts(), **OPTIONS), **prompts(), **OPTIONS)
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.flip(0)
    assert_native_parity(model, stock_copy(model).generate(**prompts(), **OPTIONS), **prompts(), **OPTIONS)
    hf_paged.get_engine(model).release_memory()
    assert hf_paged.get_engine(model).stats().shadow_bytes == 0
    assert_native_parity(model, stock_copy(model).generate(**prompts(), **OPTIONS), **prompts(), **OPTIONS)


@pytest.mark.parametrize("autocast", [False, True])
def test_qlora(autocast, monkeypatch):
    model = to_gpu(qlora(monkeypatch, torch.bfloat16, head_dim=64))
    hf_paged.enable(model, strict=True, dequantize=False)
    found = []
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            found.append(model.generate(**prompts(), **OPTIONS))
    assert isinstance(weight_of(model), Packed4BitGroup)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_a_ready_engine_compiles_nothing(monkeypatch):
    monkeypatch.setenv(kernel_log.AFTER_READY, "error")
    model = to_gpu(quantize(tiny_model(**SHAPE).bfloat16(), True, torch.bfloat16))
    with PagedGenerator(model, dequantize=False, warmup="full", max_num_seqs=96, num_blocks=512) as generator:
        generator.warm_up()
        given = random_prompts([5 + i % 90 for i in range(80)])
        for count in (1, 3, 17, 33, 80):
            found = generator.generate(given[:count], max_new_tokens=6)
            assert all(completion.error is None for completion in found)
