"""PEFT's LoRA in fused layers: stock's tokens with PEFT's modules called, and with tables of adapters in their place.

On a CPU nothing reads tables, so a fixture has the kernels' references do so. Kernels: `test_lora_kernels.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support import (
    HostMemory,
    assert_native_parity,
    assert_native_tokens,
    batch,
    stock_copy,
    stock_generate,
    tiny_model,
)
from torch import nn

import hf_paged
from hf_paged.models import fused, linears, lora, tuners
from hf_paged.models.lora import Adapters, find_layers

peft = pytest.importorskip("peft")

from lora_models import ALL_LINEAR, with_adapter  # noqa: E402

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


@pytest.fixture(params=["modules", "tables"])
def way(request, monkeypatch):
    if request.param == "tables":
        monkeypatch.setattr(fused, "reads_tables", lambda device: True)
        monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    return request.param


def check(model, expected=None):
    """The enabled model gives stock's tokens, which are not the base's."""
    expected = stock_copy(model).generate(**INPUTS, **OPTIONS) if expected is None else expected
    assert not torch.equal(expected, stock_generate(tiny_model(), **INPUTS, **OPTIONS))
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, INPUTS, **OPTIONS)
    return expected


@pytest.mark.each_value
@pytest.mark.parametrize("options", [
    {}, {"r": 1}, {"r": 20}, {"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["k_proj", "o_proj"]},
    {"target_modules": ["up_proj"]}, {"target_modules": ["gate_proj", "down_proj"]}, {"use_rslora": True},
    {"lora_bias": True}, {"rank_pattern": {"q_proj": 7, "up_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    {"layers_to_transform": [1]}, {"target_modules": "all-linear"},
], ids=str)
def test_one_adapter(way, options):
    check(with_adapter(tiny_model(), **options))


def test_another_activation(way):
    """No kernel adds to gates and ups on its way to one that is not SiLU."""
    model = with_adapter(tiny_model(hidden_act="gelu"))
    expected = stock_copy(model).generate(**INPUTS, **OPTIONS)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, INPUTS, **OPTIONS)


def test_biases_of_the_base(way):
    model = tiny_model(attention_bias=True)
    model = with_adapter(model)
    expected = stock_copy(model).generate(**INPUTS, **OPTIONS)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, INPUTS, **OPTIONS)


def test_several_active(way):
    model = with_adapter(with_adapter(with_adapter(tiny_model()), "second", 6, r=9), "third", 7,
                         targets=["v_proj", "down_proj"])
    model.base_model.set_adapter(["third", "default", "second"])
    check(model)


def test_added_switched_disabled_merged_and_deleted(way):
    model = with_adapter(tiny_model())
    expected = [check(model)]
    with_adapter(model, "second", 6, r=12)
    check(model, expected[0])
    model.set_adapter("second")
    expected.append(check(model))
    assert not torch.equal(*expected)
    with model.disable_adapter():
        base = stock_copy(tiny_model()).generate(**INPUTS, **OPTIONS)
        assert_native_tokens(model, base, INPUTS, **OPTIONS)
    check(model, expected[1])
    model.merge_adapter()
    check(model, expected[1])
    model.unmerge_adapter()
    model.set_adapter("default")
    model.delete_adapter("second")
    check(model, expected[0])
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)
    assert not torch.equal(check(model), expected[0])


def test_trained_between_calls(way):
    model = with_adapter(tiny_model())
    before = check(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        model(input_ids=INPUTS["input_ids"], labels=INPUTS["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(check(model), before)


def test_an_adapter_that_moved(way):
    """`.data` that is replaced leaves no trace but its address."""
    model = with_adapter(tiny_model())
    before = check(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = -parameter.data.clone()
    expected = stock_copy(model).generate(**INPUTS, **OPTIONS)
    assert not torch.equal(expected, before)
    assert_native_tokens(model, expected, INPUTS, **OPTIONS)  # enabled once, or its engine might be another


def test_enabled_first(way):
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    wrapped = with_adapter(model)
    check(wrapped)
    unloaded = wrapped.unload()
    assert_native_parity(unloaded, **INPUTS, **OPTIONS)


def test_beside_variants_and_layers_with_hooks(way):
    """What is more than plain LoRA is called as it stands, in the same group as what is not."""
    model = with_adapter(tiny_model(), target_modules=["q_proj", "gate_proj"])
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "up_proj"], use_dora=True, init_lora_weights=False)
    model.add_adapter("dora", config)
    model.base_model.set_adapter(["default", "dora"])
    check(model)


def test_bases_are_merged_and_state_stays(way, monkeypatch):
    model = with_adapter(tiny_model())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(model)
    if way == "tables":
        for layer in model.base_model.model.model.layers:
            weights = [getattr(layer.self_attn, name).base_layer.weight for name in ALL_LINEAR[:3]]
            ends = [w.data_ptr() + w.numel() * w.element_size() for w in weights]
            assert ends[:-1] == [w.data_ptr() for w in weights[1:]]
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("base", "adapters"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_log_probs_are_as_near_to_float32_as_stocks(way, base, adapters, autocast):
    """Of every token, by the logits that a call returns."""
    exact = with_adapter(tiny_model())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(parameter.to(adapters if "lora_" in name else base))
    model = copy.deepcopy(exact)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(adapters if "lora_" in name else base)
    inputs = batch([*range(5, 45)])

    def log_probs(of, dtype):
        """[rows, V] float64, behind the inputs."""
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            made = of.generate(**inputs, max_new_tokens=1, output_logits=True, return_dict_in_generate=True,
                               use_cache=False)
        return made.logits[0].double().log_softmax(-1)

    wanted = log_probs(exact, None)
    stock = (log_probs(model, autocast) - wanted).abs().mean()
    hf_paged.enable(model, strict=True)
    assert (log_probs(model, autocast) - wanted).abs().mean() <= 1.1 * stock + 1e-6


def _first_layer(model):
    return model.base_model.model.model.layers[0].self_attn


def _linear(model):
    return _first_layer(model).q_proj


def _set(owner, name, value):
    setattr(owner, name, value)


@pytest.mark.parametrize("change", [
    lambda m: _linear(m).register_forward_hook(lambda *_: None),
    lambda m: _linear(m).lora_A["default"].register_forward_hook(lambda *_: None),
    lambda m: _linear(m).base_layer.register_forward_pre_hook(lambda *_: None),
    lambda m: _set(_linear(m), "forward", lambda x: x),
    lambda m: _set(_linear(m), "cast_input_dtype_enabled", False),
    lambda m: _linear(m).lora_variant.update(default=object()),
    lambda m: _linear(m).lora_dropout.update({"default": nn.Tanh()}),
    lambda m: _linear(m).lora_A.update({"default": nn.Linear(8, 4)}),
    lambda m: _linear(m).lora_B["default"].double(),
    lambda m: _set(_linear(m), "base_layer", nn.Sequential(_linear(m).base_layer)),
], ids=range(10))
def test_what_is_no_plain_lora(change):
    model = with_adapter(tiny_model())
    assert id(_linear(model)) in find_layers([[_linear(model)]])
    change(model)
    assert not find_layers([[_linear(model)]])


def test_adapters_of_two_dtypes_are_left_to_peft():
    model = with_adapter(tiny_model())
    _first_layer(model).k_proj.lora_A["default"].half()
    _first_layer(model).k_proj.lora_B["default"].half()
    assert not find_layers([[_linear(model), _first_layer(model).k_proj]])
    assert find_layers([[_first_layer(model).k_proj]])


def test_a_patched_class_is_left_to_peft(monkeypatch):
    model = with_adapter(tiny_model())
    assert Adapters([(_linear(model),)], ())
    monkeypatch.setattr(type(_linear(model)), "forward", lambda self, x: x)
    assert not Adapters([(_linear(model),)], ())


def test_peft_need_not_be_there(monkeypatch):
    monkeypatch.setattr(lora, "_MODULE", "no.such.module")
    monkeypatch.setattr(lora, "_CLASSES", (("no.such.module", "Linear", False),))
    assert not lora.is_loaded()
    assert not find_layers([[_linear(with_adapter(tiny_model()))]])


SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}


def test_rows_of_different_adapters(way, monkeypatch):
    """Stock's tokens; rows are put in order once a step, whatever the number of layers, and last tokens once more."""
    calls = {"order": 0, "steps": 0}
    narrowed = []

    def counted(name, of):
        def call(*args):
            calls[name] += 1
            return of(*args)

        return call

    own = fused.FusedExecutor.hidden_states
    monkeypatch.setattr(fused.FusedExecutor, "hidden_states", lambda self, ids, step: (
        narrowed.append(step.wanted is not None), own(self, ids, step))[1])
    monkeypatch.setattr(tuners, "order_rows", counted("order", tuners.order_rows))
    monkeypatch.setattr(fused.FusedExecutor, "hidden_states", counted("steps", fused.FusedExecutor.hidden_states))
    model = with_adapter(with_adapter(tiny_model()), "second", 6, r=9)
    options = {**OPTIONS, "adapter_names": ["second", "__base__", "default"]}
    expected = stock_copy(model).generate(**INPUTS, **options)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, INPUTS, **options)
    assert calls["steps"] >= OPTIONS["max_new_tokens"]
    assert sum(narrowed) >= 1
    assert calls["order"] == (calls["steps"] + sum(narrowed) if way == "tables" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"r": 20}, {"target_modules": ["v_proj", "up_proj"]}, {"lora_bias": True}],
                         ids=str)
def test_on_a_gpu(options):
    """Kernels and graphs, switched and trained between calls."""
    inputs = {name: tensor.cuda() for name, tensor in INPUTS.items()}
    model = with_adapter(tiny_model(**SHAPE), **options)
    with_adapter(model, "second", 6)
    model = model.cuda()
    for names in (["default"], ["second", "default"], ["second"]):
        model.base_model.set_adapter(names)
        expected = stock_copy(model).generate(**inputs, **OPTIONS)
        assert_native_tokens(hf_paged.enable(model, strict=True), expected, inputs, **OPTIONS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "second" in name:
                parameter.neg_()
    assert_native_tokens(model, stock_copy(model).generate(**inputs, **OPTIONS), inputs, **OPTIONS)
    for _ in range(3):  # prompts that are cached make smaller steps, which get a graph of their own
        model.generate(**inputs, **OPTIONS)
    graphs = hf_paged.get_engine(model).stats().num_graphs_captured
    model.generate(**inputs, **OPTIONS)
    assert hf_paged.get_engine(model).stats().num_graphs_captured == graphs


@pytest.mark.gpu
@pytest.mark.parametrize("target", ALL_LINEAR)
def test_one_adapted_layer_on_a_gpu(target):
    """Its neighbours over the same input have no adapter at all."""
    inputs = {name: tensor.cuda() for name, tensor in INPUTS.items()}
    model = with_adapter(tiny_model(**SHAPE), target_modules=[target]).cuda()
    expected = stock_copy(model).generate(**inputs, **OPTIONS)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, inputs, **OPTIONS)


@pytest.mark.gpu
def test_rows_of_different_adapters_on_a_gpu():
    inputs = {name: tensor.cuda() for name, tensor in INPUTS.items()}
    model = with_adapter(with_adapter(tiny_model(**SHAPE)), "second", 6, r=9).cuda()
    options = {**OPTIONS, "adapter_names": ["second", "__base__", "default"]}
    expected = stock_copy(model).generate(**inputs, **options)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, inputs, **options)
    assert_native_tokens(model, stock_copy(model).generate(**inputs, **OPTIONS), inputs, **OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_autocast_on_a_gpu(base):
    """Over copies of float32 weights, or bfloat16 ones as they are: as near to float32 as stock."""
    exact = with_adapter(tiny_model(**SHAPE))
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(parameter.to(torch.float32 if "lora_" in name else base))
    model = copy.deepcopy(exact).cuda()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else base)
    inputs = {name: tensor.cuda() for name, tensor in batch([*range(5, 45)]).items()}

    def log_probs(of, autocast):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            made = of.generate(**inputs, max_new_tokens=1, output_logits=True, return_dict_in_generate=True,
                               use_cache=False)
        return made.logits[0].double().log_softmax(-1)

    wanted = log_probs(exact.cuda(), False)
    stock = (log_probs(model, True) - wanted).abs().mean()
    assert (log_probs(hf_paged.enable(model, strict=True), True) - wanted).abs().mean() <= 1.1 * stock
