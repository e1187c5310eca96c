"""Hooks, wrappers, devices, dtypes and train mode: where the packed step is not what the model's forward computes."""

from __future__ import annotations

import copy
import functools
import os
import types
import warnings

import pytest
import torch
from support import assert_falls_back, assert_native_parity, assert_same_tensor, batch, stock_generate, tiny_model
from torch import nn
from transformers import AttentionMaskInterface, GenerationMixin, LogitsProcessorList, Qwen3ForCausalLM
from transformers.activations import SiLUActivation
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

import hf_paged


def _doubled(module, args, output):
    return output * 2


def _ones(module, args):
    return (torch.ones_like(args[0]),)


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_a_forward_hook_on_any_module(path):
    model, inputs = tiny_model(), batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    model.get_submodule(path).register_forward_hook(lambda module, args, output: -2 * output)
    expected = assert_falls_back(model, f"{path} has a forward hook", **inputs, max_new_tokens=6)
    assert not torch.equal(expected, plain)


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
])
def test_a_global_hook(register):
    model, calls = tiny_model(), []
    handle = register(lambda module, *args: calls.append(type(module)))
    try:
        assert_falls_back(model, "global forward hooks", **batch([20, 7]), max_new_tokens=3)
    finally:
        handle.remove()
    assert nn.Linear in calls


def test_the_hook_of_input_gradients_does_not_matter():
    """Trainers and PEFT leave it on the embedding where activations are checkpointed; one that does more is a hook."""
    model, inputs = tiny_model(), batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    model.enable_input_require_grads()
    assert model.model.embed_tokens._forward_hooks
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, plain, **inputs, max_new_tokens=6)
    with torch.inference_mode():
        assert_native_parity(model, plain, **inputs, max_new_tokens=6)
    seen = []

    def make_inputs_require_grads(module, args, output):
        seen.append(output.requires_grad_(True))

    model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)
    with pytest.raises(hf_paged.FallbackError, match="embed_tokens has a forward hook"):
        model.generate(**inputs, max_new_tokens=6)


def test_backward_hooks_do_not_matter():
    model = tiny_model()
    model.model.layers[0].register_full_backward_hook(lambda *args: None)
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([20, 7]), max_new_tokens=6)


class _Slots:
    """A wrapper without attributes of its own, from a module with a known name."""

    __module__ = "accelerate.wrappers"
    __slots__ = ("forward",)

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


def _of_no_module(forward):
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    wrapper.__module__ = None
    return wrapper


@pytest.mark.parametrize("wrapper", [_Slots, _of_no_module])
def test_a_forward_in_a_wrapper_that_says_nothing_of_itself(wrapper):
    model = tiny_model()
    model.forward = wrapper(model.forward)
    assert_falls_back(model, "a wrapper that hf_paged does not know", **batch([20, 7]), max_new_tokens=6)


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
    assert_falls_back(model, r"model\.norm is a torch\..*\.LayerNorm, not", **batch([20, 7]), max_new_tokens=6)


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
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 7])
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_generate(model, **inputs, max_new_tokens=6)
        assert_native_parity(model, expected, **inputs, max_new_tokens=6)


def test_autocast_that_flex_attention_does_not_know():
    """Queries and values then have different dtypes: stock's error is stock's to raise."""
    model = hf_paged.enable(tiny_model(attn_implementation="flex_attention"))
    assert hf_paged.get_engine(model).unsupported_reason() is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "flex_attention does not know" in str(hf_paged.get_engine(model).unsupported_reason())


def test_autocast_to_full_precision(monkeypatch):
    model = hf_paged.enable(tiny_model().bfloat16())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)  # which CUDA has
    assert "autocast to torch.float32" in str(hf_paged.get_engine(model).unsupported_reason())


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
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **inputs, max_new_tokens=6)


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


@pytest.mark.parametrize("hook", [True, False])
def test_train_mode_with_gradient_checkpointing_gives_stocks_tokens(hook):
    """Before transformers 5.24 stock's layers then drop the cache: the tokens are not those of eval mode."""
    model = tiny_model()
    inputs = batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    if not hook:
        model.disable_input_require_grads()
    model.train()
    if torch.equal(model.generate(**inputs, max_new_tokens=6), plain):
        assert_native_parity(hf_paged.enable(model, strict=True), plain, **inputs, max_new_tokens=6)
    else:
        assert_falls_back(model, "checkpoints activations in train mode", **inputs, max_new_tokens=6)
        hf_paged.enable(model, strict=True)
    assert_native_parity(model.eval(), plain, **inputs, max_new_tokens=6)
    model.gradient_checkpointing_disable()
    assert_native_parity(model.train(), plain, **inputs, max_new_tokens=6)


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


# -- patches of classes and of module-level functions ------------------------------------------


def _rolled(output):
    """An output of any forward with its features moved by one: whoever ignores the patch makes other tokens."""
    if isinstance(output, torch.Tensor):
        return output.roll(1, -1)
    if isinstance(output, tuple):
        return (output[0].roll(1, -1), *output[1:])
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            setattr(output, name, getattr(output, name).roll(1, -1))
    return output


def _patched(function):
    return lambda *args, **kwargs: _rolled(function(*args, **kwargs))


PATCHED_CLASSES = (
    "Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm",
    "Qwen3RotaryEmbedding",
)


@pytest.mark.parametrize("name", PATCHED_CLASSES)
def test_a_forward_patched_on_transformers_class(name, monkeypatch):
    """As liger, unsloth and steering papers do it: the class itself says what is expected of its objects."""
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 20])
    plain = assert_native_parity(model, **inputs, max_new_tokens=6)
    cls = getattr(modeling_qwen3, name)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", _patched(cls.forward))
        expected = stock_generate(model, **inputs, max_new_tokens=6)
        assert not torch.equal(expected, plain)
        with pytest.raises(hf_paged.FallbackError, match=name):
            model.generate(**inputs, max_new_tokens=6)
        hf_paged.disable(model)
        assert_falls_back(model, name, **inputs, max_new_tokens=6)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, plain, **inputs, max_new_tokens=6)


@pytest.mark.parametrize("name", ["Qwen3MLP", "Qwen3Attention", "Qwen3DecoderLayer"])
def test_a_call_patched_on_transformers_class(name, monkeypatch):
    cls = getattr(modeling_qwen3, name)
    monkeypatch.setattr(cls, "__call__", _patched(nn.Module.__call__))
    assert_falls_back(tiny_model(), f"{name}.__call__", **batch([20, 20]), max_new_tokens=6)


@pytest.mark.parametrize("cls", [nn.Linear, nn.Embedding, SiLUActivation], ids=lambda cls: cls.__name__)
def test_a_forward_patched_on_a_class_of_layers(cls, monkeypatch):
    model, plain = tiny_model(), tiny_model().generate(**batch([20, 20]), max_new_tokens=6)
    monkeypatch.setattr(cls, "forward", _patched(cls.forward))
    assert not torch.equal(assert_falls_back(model, "", **batch([20, 20]), max_new_tokens=6), plain)


def _ligers_rope(q, k, cos, sin, unsqueeze_dim=1):
    """For [batch, heads, length, head_dim] whatever `unsqueeze_dim` says, and turning the other way."""
    cos, sin = cos.unsqueeze(1), -sin.unsqueeze(1)
    rotate = modeling_qwen3.rotate_half
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def _half_eager(*args, _stock=modeling_qwen3.eager_attention_forward, **kwargs):
    output, weights = _stock(*args, **kwargs)
    return output.roll(1, -1), weights


def _no_mask(*args, **kwargs):
    return None


PATCHED_FUNCTIONS = [
    ("apply_rotary_pos_emb", _ligers_rope, "sdpa"),
    ("rotate_half", lambda x: x.roll(1, -1), "sdpa"),
    ("eager_attention_forward", _half_eager, "eager"),
    ("repeat_kv", lambda x, n: x.repeat(1, n, 1, 1), "eager"),
    ("create_causal_mask", _no_mask, "eager"),
]


@pytest.mark.parametrize(("name", "function", "attention"), PATCHED_FUNCTIONS, ids=[p[0] for p in PATCHED_FUNCTIONS])
def test_a_patched_function_of_transformers_module(name, function, attention, monkeypatch):
    model = tiny_model()
    model.set_attn_implementation(attention)
    inputs = batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    monkeypatch.setattr(modeling_qwen3, name, function)
    assert not torch.equal(assert_falls_back(model, "is patched", **inputs, max_new_tokens=6), plain)


@pytest.mark.parametrize("wrap", [torch.no_grad(), functools.partial, torch.compiler.disable])
def test_a_patch_does_not_hide_behind_a_wrapper(wrap, monkeypatch):
    """torch's and functools' wrappers are own code; what they wrap is not."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", wrap(_ligers_rope))
    assert_falls_back(tiny_model(), "is patched", **batch([20, 20]), max_new_tokens=6)


def test_a_patch_by_a_package_whose_name_begins_like_torchs(monkeypatch):
    """torchao, torchtune and others lie beside torch: their path begins with its."""
    namespace: dict = {}
    path = os.path.dirname(torch.__file__) + "foo/ops.py"
    exec(compile("def rotate_half(x):\n    return x.roll(1, -1)\n", path, "exec"), namespace)
    monkeypatch.setattr(modeling_qwen3, "rotate_half", namespace["rotate_half"])
    assert_falls_back(tiny_model(), "is patched", **batch([20, 20]), max_new_tokens=6)


def test_a_mask_function_of_the_users_own_under_a_known_name():
    sdpa = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def without_the_first_key(*args, **kwargs):
        mask = sdpa(*args, **{**kwargs, "allow_is_causal_skip": False}).clone()
        mask[..., 1:, 0] = False
        return mask

    model, inputs = tiny_model(), batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    AttentionMaskInterface.register("sdpa", without_the_first_key)
    try:
        assert not torch.equal(assert_falls_back(model, "sdpa", **inputs, max_new_tokens=6), plain)
    finally:
        AttentionMaskInterface.register("sdpa", sdpa)
    assert_native_parity(hf_paged.enable(model, strict=True), plain, **inputs, max_new_tokens=6)


# -- methods that decide ------------------------------------------


def _own_sample(self, input_ids, *args, **kwargs):
    return torch.cat([input_ids, torch.full((len(input_ids), 3), 7)], dim=-1)


def _own_prefill(self, *args, **kwargs):
    return _rolled(Qwen3ForCausalLM._prefill(self, *args, **kwargs))


def _own_call(self, *args, **kwargs):
    return _rolled(Qwen3ForCausalLM.__call__(self, *args, **kwargs))


def _own_criteria(self, *args, **kwargs):
    found = Qwen3ForCausalLM._get_stopping_criteria(self, *args, **kwargs)
    return type(found)([MaxLengthCriteria(23)])


def _no_processors(self, *args, **kwargs):
    return LogitsProcessorList()


def _own_end(self, this_peer_finished, *args, **kwargs):
    return False


OWN_METHODS = {
    "_sample": (_own_sample, "_sample"), "_prefill": (_own_prefill, "_prefill"), "__call__": (_own_call, "__call__"),
    "_get_stopping_criteria": (_own_criteria, "criteri|Criteri"),
    "_get_logits_processor": (_no_processors, "processor"),
    "_has_unfinished_sequences": (_own_end, "_has_unfinished_sequences"),
}
BARRED = {"eos_token_id": list(range(1, 256, 3)), "min_new_tokens": 6}


@pytest.mark.parametrize("name", OWN_METHODS)
def test_a_subclass_with_a_deciding_method_of_its_own(name):
    method, reason = OWN_METHODS[name]
    cls = type("Mine", (Qwen3ForCausalLM,), {name: method, "__module__": __name__})
    model, inputs = tiny_model(), batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=8, **BARRED)
    model.__class__ = cls
    expected = assert_falls_back(model, reason, **inputs, max_new_tokens=8, **BARRED)
    assert not torch.equal(expected, plain)


@pytest.mark.parametrize("enabled_before", [False, True])
def test_sample_patched_on_transformers_mixin(enabled_before, monkeypatch):
    model, inputs = tiny_model(), batch([20, 20])
    if enabled_before:
        hf_paged.disable(hf_paged.enable(model))
    monkeypatch.setattr(GenerationMixin, "_sample", _own_sample)
    expected = assert_falls_back(model, "_sample", **inputs, max_new_tokens=8)
    assert expected.shape[1] == 23


def test_beam_search_patched_on_transformers_mixin_after_a_first_enable(monkeypatch):
    """The class that an enabled model gets is made once; what it passes on to must be looked up at every call."""
    model, inputs = hf_paged.enable(tiny_model()), batch([20, 20])
    monkeypatch.setattr(GenerationMixin, "_beam_search", _own_sample)
    with pytest.warns(hf_paged.FallbackWarning, match="beam"):
        actual = model.generate(**inputs, max_new_tokens=8, num_beams=2)
    assert_same_tensor(actual, stock_generate(model, **inputs, max_new_tokens=8, num_beams=2))


# -- what stock reads off the config at every call ------------------------------------------


def _config_not_causal(model):
    model.config.is_causal = False


def _layers_not_causal(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize("change", [_config_not_causal, _layers_not_causal])
def test_attention_that_is_not_causal(change):
    model, inputs = tiny_model(), batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    change(model)
    assert not torch.equal(assert_falls_back(model, "causal", **inputs, max_new_tokens=6), plain)


SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def _config_window(model):
    model.config.sliding_window = 4


def _config_layer_types(model):
    model.config.layer_types = ["full_attention"] * 2


def _config_layer_types_exchanged(model):
    model.config.layer_types = model.config.layer_types[::-1]


def _attention_window(model):
    model.model.layers[1].self_attn.sliding_window = 4


@pytest.mark.parametrize("change", [
    _config_window, _config_layer_types, _config_layer_types_exchanged, _attention_window,
])
def test_windows_of_config_and_layers_that_came_apart(change):
    """Stock masks by the config's window and kind of layer."""
    model, inputs = tiny_model(**SLIDING), batch([40, 40])
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    plain = model.generate(**inputs, max_new_tokens=6)
    change(model)
    hf_paged.enable(model)
    expected = stock_generate(model, **inputs, max_new_tokens=6)
    assert change is _attention_window or not torch.equal(expected, plain)  # sdpa heeds the mask alone
    with pytest.warns(hf_paged.FallbackWarning, match="sliding_window"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


def test_windows_changed_in_config_and_layers_alike_are_native():
    model, inputs = hf_paged.enable(tiny_model(**SLIDING), strict=True), batch([40, 40])
    first = assert_native_parity(model, **inputs, max_new_tokens=6)
    model.config.sliding_window = model.model.layers[1].self_attn.sliding_window = 4
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=6), first)


def test_layers_in_another_order_than_their_cache_indices():
    model = tiny_model()
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    assert_falls_back(model, "layer 0 has layer_idx=1", **batch([20, 20]), max_new_tokens=6)


def test_query_and_key_norms_with_other_epsilons_than_each_other():
    """The fused op takes one epsilon for both."""
    model, inputs = tiny_model(), batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    model.model.layers[0].self_attn.k_norm.variance_epsilon = 30.0
    assert not torch.equal(assert_falls_back(model, "epsilon", **inputs, max_new_tokens=6), plain)


# -- modules that look at rows or at the sequence ------------------------------------------


class LooksAtTheSequence(nn.Module):
    def forward(self, x):
        return x - x.mean(-2, keepdim=True) if x.shape[-2] > 1 else x


def _sequential(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj = nn.Sequential(attention.v_proj, LooksAtTheSequence())


def _activation(model):
    model.model.layers[0].mlp.act_fn = LooksAtTheSequence()


def _softmax_over_rows(model):
    model.model.layers[0].mlp.act_fn = nn.Softmax(dim=1)


def _subclass_of_silu(model):
    class Looking(nn.SiLU):
        def forward(self, x):
            return LooksAtTheSequence()(super().forward(x))

    model.model.layers[0].mlp.act_fn = Looking()


def _in_sequential_head(model):
    model.lm_head = nn.Sequential(model.lm_head, LooksAtTheSequence(), nn.Dropout(0.0))


@pytest.mark.parametrize("change", [
    _sequential, _activation, _softmax_over_rows, _subclass_of_silu, _in_sequential_head,
])
def test_a_module_that_looks_at_the_whole_sequence(change):
    model, inputs = tiny_model(), batch([20, 20])
    plain = model.generate(**inputs, max_new_tokens=6)
    change(model)
    expected = assert_falls_back(model, "not transformers' own SiLU|look at batch rows", **inputs, max_new_tokens=6)
    assert change is _in_sequential_head or not torch.equal(expected, plain)


@pytest.mark.parametrize(("name", "native"), [("Linear8bitLt", False), ("Linear4bit", True)])
def test_bitsandbytes_layer_that_picks_outliers_over_all_rows(name, native):
    stand_in = type(name, (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model = tiny_model()
    model.model.layers[0].mlp.down_proj.__class__ = stand_in
    if native:
        assert_native_parity(hf_paged.enable(model, strict=True), **batch([20, 20]), max_new_tokens=6)
    else:
        assert_falls_back(model, "Linear8bitLt", **batch([20, 20]), max_new_tokens=6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_elementwise_activations_are_native(activation):
    model = hf_paged.enable(tiny_model(hidden_act=activation), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)


# -- vocabulary ------------------------------------------


def test_an_embedding_larger_than_the_configs_vocabulary():
    model = tiny_model()
    model.model.embed_tokens = nn.Embedding(300, 64)
    hf_paged.enable(model, strict=True)
    inputs = {"input_ids": torch.tensor([[5, 299, 270, 9]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    assert_native_parity(model, **inputs, max_new_tokens=6)
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[5, 300]]), max_new_tokens=2)


def test_a_configs_vocabulary_lowered_while_enabled():
    model = hf_paged.enable(tiny_model(), strict=True)
    model.config.vocab_size = 8
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=6)


@pytest.mark.parametrize("place", ["model", "attention"])
def test_a_config_of_a_modules_own_goes_to_stock(place):
    """Stock's modules read the config that they hold, and the engine that of the model."""
    model = tiny_model()
    owner = model.model if place == "model" else model.model.layers[0].self_attn
    owner.config = copy.deepcopy(model.config)
    owner.config.is_causal = False
    assert_falls_back(model, "has another config than the model", **batch([20]), max_new_tokens=4)
