"""Hooks, wrappers, devices, dtypes and train mode: where the packed step is not what the model's forward computes."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from support import assert_falls_back, assert_native_parity, assert_same_tensor, batch, stock_generate, tiny_model
from torch import nn

import hf_paged


def _doubled(module, args, output):
    return output * 2


def _ones(module, args):
    return (torch.ones_like(args[0]),)


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_a_forward_hook_on_any_module(path):
    model = tiny_model()
    plain = model.generate(**batch([20, 7]), max_new_tokens=6)
    model.get_submodule(path).register_forward_hook(
        lambda module, args, output: -2 * output if isinstance(output, torch.Tensor) else output
    )
    expected = assert_falls_back(model, f"{path} has a forward hook", **batch([20, 7]), max_new_tokens=6)
    assert path in ("model.norm", "model.layers.0.mlp.up_proj", "lm_head", "model.layers.1")
    assert expected.shape == plain.shape


def test_a_forward_hook_on_the_model_itself_sees_stocks_shapes():
    model, shapes = tiny_model(), []
    model.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.logits.shape)))
    assert_falls_back(model, "forward hook", **batch([20, 7]), max_new_tokens=3)
    assert set(shapes) == {(2, 1, 256)}


def test_a_forward_pre_hook():
    model = tiny_model()
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(_ones)
    assert_falls_back(model, "q_proj has a forward hook", **batch([20, 7]), max_new_tokens=6)


def test_a_hook_that_comes_and_goes_while_enabled():
    model = hf_paged.enable(tiny_model())
    inputs = batch([40, 7])
    before = assert_native_parity(model, **inputs, max_new_tokens=6)
    handle = model.model.layers[0].mlp.down_proj.register_forward_hook(_doubled)
    expected = stock_generate(model, **inputs, max_new_tokens=6)
    assert not torch.equal(expected, before)
    with pytest.warns(hf_paged.FallbackWarning, match="hook"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)
    handle.remove()
    assert_native_parity(model, **inputs, max_new_tokens=6)


@pytest.mark.parametrize("register", [
    nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook,
])  # fmt: skip
def test_a_global_hook(register):
    model, calls = tiny_model(), []
    handle = register(lambda module, *args: calls.append(type(module)))
    try:
        assert_falls_back(model, "global forward hooks", **batch([20, 7]), max_new_tokens=3)
    finally:
        handle.remove()
    assert nn.Linear in calls


def test_backward_hooks_do_not_matter():
    model = tiny_model()
    model.model.layers[0].register_full_backward_hook(lambda *args: None)
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([20, 7]), max_new_tokens=6)


def test_forward_replaced_on_the_instance():
    model = tiny_model()
    stock_forward = model.forward

    def forward(self, *args, **kwargs):
        output = stock_forward(*args, **kwargs)
        output.logits = -output.logits
        return output

    plain = model.generate(**batch([20, 7]), max_new_tokens=6)
    model.forward = types.MethodType(forward, model)
    expected = assert_falls_back(model, "forward is replaced on the instance", **batch([20, 7]), max_new_tokens=6)
    assert not torch.equal(expected, plain)


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_deciding_methods_replaced_on_the_instance(name):
    model = tiny_model()
    stock_method = getattr(model, name)
    setattr(model, name, lambda *args, **kwargs: stock_method(*args, **kwargs))
    assert_falls_back(model, name, **batch([20, 7]), max_new_tokens=6)


@pytest.mark.parametrize(
    "path", ["model", "model.layers.0", "model.layers.1.self_attn", "model.layers.0.mlp.gate_proj"]
)
def test_forward_of_a_submodule_replaced_on_the_instance(path):
    model = tiny_model()
    module = model.get_submodule(path)
    stock_forward = module.forward
    module.forward = lambda *args, **kwargs: stock_forward(*args, **kwargs)
    assert_falls_back(model, "is replaced on the instance", **batch([20, 7]), max_new_tokens=6)


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class Attention(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output, weights = self.inner(*args, **kwargs)
        return 2 * output, weights


def test_a_linear_layer_of_a_foreign_class():
    model = tiny_model()
    foreign = Negated(64, 96, bias=False)
    foreign.weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj = foreign
    assert_falls_back(model, "Negated", **batch([20, 7]), max_new_tokens=6)


def test_an_attention_of_a_foreign_class():
    model = tiny_model()
    model.model.layers[0].self_attn = Attention(model.model.layers[0].self_attn)
    hf_paged.enable(model)
    inputs = batch([20, 7])
    expected = stock_generate(model, **inputs, max_new_tokens=6)
    with pytest.warns(hf_paged.FallbackWarning, match="Attention"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


def test_a_norm_replaced_by_another_kind():
    model = tiny_model()
    model.model.norm = nn.LayerNorm(64)
    assert_falls_back(model, "model.norm is a LayerNorm", **batch([20, 7]), max_new_tokens=6)


def test_a_parametrized_weight():
    model = tiny_model()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    assert_falls_back(model, "parametri|Parametri", **batch([20, 7]), max_new_tokens=6)


def test_layers_that_were_dropped_stay_dropped():
    model = tiny_model(num_hidden_layers=4)
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in (0, 1, 2)])
    model.config.num_hidden_layers = 3
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([20, 7]), max_new_tokens=6)


def test_a_resized_vocabulary():
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)
    model.resize_token_embeddings(300)
    inputs = {"input_ids": torch.tensor([[5, 299, 270, 9]])}
    assert_native_parity(model, **inputs, max_new_tokens=6)


# -- autocast ------------------------------------------


def test_ambient_autocast_to_another_dtype():
    def call(model, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return model.generate(**kwargs)

    assert_falls_back(tiny_model(), "autocast", call=call, **batch([20, 7]), max_new_tokens=6)


def test_ambient_autocast_to_the_weights_dtype():
    model = hf_paged.enable(tiny_model().bfloat16(), strict=True)
    inputs = batch([20, 7])
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_generate(model, **inputs, max_new_tokens=6)
        assert_native_parity(model, expected, **inputs, max_new_tokens=6)


def test_disabled_autocast_is_none():
    model = hf_paged.enable(tiny_model(), strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda precision: Accelerator(mixed_precision=precision, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("enable_first", [False, True])
def test_accelerates_autocast_around_fp32_weights(accelerator, enable_first):
    reference = accelerator("bf16").prepare_model(tiny_model())
    inputs = batch([20, 7])
    expected = reference.generate(**inputs, max_new_tokens=6)
    model = tiny_model()
    if enable_first:
        hf_paged.enable(model)
    model = accelerator("bf16").prepare_model(model)
    if not enable_first:
        hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match="bfloat16"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)
    hf_paged.enable(model, strict=True)
    with pytest.raises(hf_paged.FallbackError, match="bfloat16"):
        model.generate(**inputs, max_new_tokens=6)


def test_accelerates_autocast_around_bf16_weights_is_native(accelerator):
    inputs = batch([20, 7])
    reference = accelerator("bf16").prepare_model(tiny_model().bfloat16())
    expected = reference.generate(**inputs, max_new_tokens=6)
    model = hf_paged.enable(accelerator("bf16").prepare_model(tiny_model().bfloat16()), strict=True)
    assert_native_parity(model, expected, **inputs, max_new_tokens=6)


def test_accelerate_without_mixed_precision_is_native(accelerator):
    model = hf_paged.enable(accelerator("no").prepare_model(tiny_model()), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)


# -- devices, dtypes, train mode ------------------------------------------


def test_a_device_map_over_two_devices():
    model = tiny_model()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    assert_falls_back(model, "hf_device_map", **batch([20, 7]), max_new_tokens=6)


def test_a_device_map_of_one_device():
    model = tiny_model()
    model.hf_device_map = {"": "cpu"}
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([20, 7]), max_new_tokens=6)


def test_cpu_offload_by_accelerates_hooks():
    from accelerate import cpu_offload

    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    hf_paged.enable(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(hf_paged.FallbackWarning):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


def test_mixed_dtypes():
    model = tiny_model().bfloat16()
    model.lm_head.float()
    inputs = batch([20, 7])
    hf_paged.enable(model)
    kinds = []
    for candidate in (stock_generate, lambda m, **kwargs: m.generate(**kwargs)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                kinds.append(candidate(model, **inputs, max_new_tokens=6))
            except RuntimeError as error:
                kinds.append(type(error))
    assert any("lm_head" in str(w.message) for w in caught)
    if isinstance(kinds[0], torch.Tensor):
        assert_same_tensor(kinds[1], kinds[0])
    else:
        assert kinds[0] is kinds[1]


def test_norms_kept_in_fp32():
    model = tiny_model().bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match="mixed dtypes"), pytest.raises(RuntimeError):
        model.generate(**batch([20, 7]), max_new_tokens=6)


def test_attention_dropout_in_train_mode():
    model = tiny_model(attention_dropout=0.5).train()
    assert_falls_back(model, "dropout in train mode", **batch([20, 7]), max_new_tokens=6)


def test_dropout_in_eval_mode_is_native():
    model = hf_paged.enable(tiny_model(attention_dropout=0.5), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)


def test_train_mode_without_dropout_is_native():
    model = hf_paged.enable(tiny_model().train(), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)
    assert model.training


def test_train_mode_with_gradient_checkpointing_gives_stocks_tokens():
    model = tiny_model()
    model.gradient_checkpointing_enable()
    model.train()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_attention_implementation_does_not_matter(implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)
    assert model.config._attn_implementation == implementation


def test_a_registered_attention_function_of_the_users_own():
    """What the user plugged into transformers' attention is part of what stock computes."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def half_attention(module, query, key, value, attention_mask, **kwargs):
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return 0.5 * output, weights

    AttentionInterface.register("hf_paged_test_half", half_attention)
    model = tiny_model()
    inputs = batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    model.set_attn_implementation("hf_paged_test_half")
    expected = model.generate(**inputs, max_new_tokens=6)
    assert not torch.equal(expected, plain)
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)
