"""What of a proved model is not run natively, and why; the switch of the attention implementation."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from family_models import family_model
from support import (
    assert_falls_back,
    assert_native_parity,
    assert_native_tokens,
    assert_same_tensor,
    batch,
    stock_copy,
    stock_generate,
)
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import hf_paged
from hf_paged.models import paged_calls
from hf_paged.models.proof.verdict import Refused

OPTIONS = {"max_new_tokens": 8}


def reason(model):
    """Why an enabled model does not run natively."""
    return hf_paged.get_engine(model).unsupported_reason()


def own_attention(module, query, key, value, attention_mask, **kwargs):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, -value, attention_mask, **kwargs)


# -- models that are not what they are known as --------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_an_attention_function_of_the_users_own(variant):
    AttentionInterface.register("mine", own_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model = hf_paged.enable(family_model(variant))
        plain = assert_native_parity(model, **batch([20, 7]), **OPTIONS)
        model.set_attn_implementation("mine")
        expected = stock_generate(model, **batch([20, 7]), **OPTIONS)
        assert not torch.equal(expected, plain)
        with pytest.warns(hf_paged.FallbackWarning, match="'mine' is not one of transformers' own"):
            assert_same_tensor(model.generate(**batch([20, 7]), **OPTIONS), expected)
        if variant == "mistral":  # no proof begins
            with pytest.raises(hf_paged.UnsupportedModelError, match="'mine' is not one of transformers' own"):
                hf_paged.enable(stock_copy(model))
    finally:
        del AttentionInterface._global_mapping["mine"], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["mine"]


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_no_attention_implementation(variant):
    """A config that was set to None afterwards: stock then attends without a mask."""
    model = hf_paged.enable(family_model(variant))
    model.config._attn_implementation = None
    expected = stock_generate(model, **batch([20, 7]), **OPTIONS)
    with pytest.warns(hf_paged.FallbackWarning, match="attention implementation None"):
        assert_same_tensor(model.generate(**batch([20, 7]), **OPTIONS), expected)


def test_softcap_where_sdpa_leaves_it_out():
    """Gemma 2 with sdpa: stock leaves the cap out in transformers 5.17, and raises in 5.23."""
    model, inputs = hf_paged.enable(family_model("gemma2")), batch([20, 7, 33])
    model.set_attn_implementation("eager")
    capped = assert_native_parity(model, **inputs, **OPTIONS)
    model.config._attn_implementation = "sdpa"
    if model._supports_sdpa:
        assert not torch.equal(assert_native_parity(model, **inputs, **OPTIONS), capped)
    else:
        assert "does not support an attention implementation through torch.nn.functional.scaled" in reason(model)
        with pytest.warns(hf_paged.FallbackWarning), pytest.raises(ValueError, match="softcap"):
            model.generate(**inputs, **OPTIONS)


def test_an_implementation_that_leaves_out_what_pages_would_not():
    """sdpa takes no sinks, and the class refuses it."""
    model = hf_paged.enable(family_model("gpt-oss"))
    assert reason(model) is None
    model.config._attn_implementation = "sdpa"
    assert "GptOssForCausalLM does not support an attention implementation through torch" in reason(model)


def test_another_name_of_transformers_own_attention(monkeypatch):
    """Under it sdpa would leave out sinks; and without a mask of the same name stock makes none."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "another", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = hf_paged.enable(family_model("gpt-oss"))
    model.config._attn_implementation_internal = "another"
    assert "'another', for which stock makes no mask" in reason(model)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "another", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    assert "'another', with which no proof runs" in reason(model)
    model.config._attn_implementation_internal = "paged|eager"
    assert "for which stock makes no mask" in reason(model)


@pytest.mark.parametrize("variant", ["mistral", "gemma2", "gpt-oss", "phi3"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_implementations_that_no_proof_can_run(variant, name):
    """They carry what eager attention carries, with which the class is proved; stock's own needs a GPU."""
    model = hf_paged.enable(family_model(variant), strict=True)
    model.set_attn_implementation("eager")
    expected = assert_native_parity(model, **batch([20, 33]), **OPTIONS)
    model.config._attn_implementation = name
    assert_native_parity(model, expected, **batch([20, 33]), **OPTIONS)


def test_what_flash_attention_would_compute_otherwise_is_refused(monkeypatch):
    def refuse(*args):
        raise Refused("its windows are no windows")

    monkeypatch.setattr("hf_paged.models.derivation.layout.check_flash", refuse)
    model = hf_paged.enable(family_model("mistral", hidden_size=32))  # of no stored layout
    assert reason(model) is None
    model.config._attn_implementation = "flash_attention_2"
    assert "its windows are no windows" in reason(model)


@pytest.mark.parametrize(("owner", "name"), [
    (modeling_gemma2, "apply_rotary_pos_emb"), (modeling_gemma2, "eager_attention_forward"),
    (modeling_gemma2.Gemma2RMSNorm, "_norm"), (modeling_gemma2.Gemma2MLP, "forward"),
])
def test_patched_code(owner, name, monkeypatch):
    model = hf_paged.enable(family_model("gemma2"))
    assert reason(model) is None
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))
    assert ("patched" in reason(model)) or ("not transformers' own" in reason(model))


def test_a_patched_class_of_the_modeling_file(monkeypatch):
    """As kernel libraries do it before the model is made."""

    class Fast(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Fast)
    assert_falls_back(family_model("llama"), "LlamaRMSNorm is patched", **batch([9]), **OPTIONS)


def test_a_helper_replaced_on_an_instance():
    model = hf_paged.enable(family_model("gemma2"))
    norm = model.model.layers[1].post_feedforward_layernorm
    norm._norm = lambda x: x
    assert reason(model) == "_norm of model.layers.1.post_feedforward_layernorm is replaced on the instance"


def test_foreign_modules():
    class Attention(modeling_llama.LlamaAttention):
        pass

    model = hf_paged.enable(family_model("llama"))
    attention = model.model.layers[1].self_attn
    attention.__class__ = Attention
    assert f"model.layers.1.self_attn is a {__name__}.Attention, not transformers' own LlamaAttention" in reason(model)
    attention.__class__ = modeling_llama.LlamaAttention
    model.model.layers[0].extra = nn.Conv1d(1, 1, 1)
    assert "model.layers.0.extra is a torch.nn.modules.conv.Conv1d" in reason(model)
    del model.model.layers[0].extra
    model.model.layers[0].mlp.act_fn = nn.Softmax(-1)
    assert reason(model) == (
        "model.layers.0.mlp.act_fn is a torch.nn.modules.activation.Softmax, not transformers' own SiLU")


def test_inconsistent_layers_and_configs():
    model = hf_paged.enable(family_model("gemma2"))
    layers = model.model.layers
    for owner, name, value, message in [
        (layers[1].self_attn, "layer_idx", 0, "self_attn holds layer_idx=0, unlike in a new model of its config"),
        (layers[1].self_attn, "is_causal", False, "is_causal=False, unlike"),
        (layers[0].self_attn, "sliding_window", None, "sliding_window=None, unlike"),
        (layers[0].self_attn, "head_dim", 8, "head_dim=8, unlike"),
        (layers[0].self_attn, "num_key_value_groups", 4, "num_key_value_groups=4, unlike"),
        (layers[0].self_attn, "scaling", 0.1, "scaling=0.1, unlike"),
        (model.config, "use_bidirectional_attention", True, "is_causal=True, unlike"),
        (model.config, "is_causal", False, "is not proved to run"),
    ]:
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        assert message in reason(model)
        setattr(owner, name, True if before is None and name == "is_causal" else before)
        assert reason(model) is None


@pytest.mark.parametrize("variant", ["mistral", "gemma2", "qwen3-moe-mixed", "gpt-oss"])
def test_a_window_of_one_token_is_left_to_stock(variant):
    """Its cache drops "all but the last 0" keys, which is none; a window of two is native."""
    inputs, options = batch([9, 20]), {"max_new_tokens": 12}
    if variant == "qwen3-moe-mixed":
        assert_falls_back(family_model(variant, sliding_window=1), "sliding_window=1", **inputs, **options)
    else:
        with pytest.raises(hf_paged.UnsupportedModelError, match="packed logits differ from those of stock's generate"):
            hf_paged.enable(family_model(variant, sliding_window=1))
    assert_native_parity(hf_paged.enable(family_model(variant, sliding_window=2), strict=True), **inputs, **options)


def test_dropout_in_train_mode():
    model = family_model("phi3", resid_pdrop=0.1)
    hf_paged.enable(model)
    assert reason(model) is None
    model.train()
    assert "model.layers.0.resid_attn_dropout drops out in train mode" in reason(model)


def test_noise_of_a_router_in_train_mode():
    model = hf_paged.enable(family_model("mixtral", router_jitter_noise=0.3))
    assert reason(model) is None
    model.train()
    assert reason(model) == "model.layers.0.mlp has jitter noise in train mode"


def test_norms_in_fp32_where_they_cast_and_where_they_do_not():
    """transformers keeps gpt-oss's norms in fp32; a Llama's would hand on fp32."""
    for variant, known in (("gpt-oss", True), ("llama", False)):
        model = family_model(variant).bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float()
        hf_paged.enable(model, strict=True)
        if known:
            inputs = batch([20, 7])
            assert model.generate(**inputs, **OPTIONS, min_new_tokens=8).shape == (2, 28)
            model.model.layers[0].mlp.experts.float()
            assert "layers of one kind have weights of several dtypes" in reason(model)
        else:
            assert "mixed dtypes: model.layers.0.input_layernorm is torch.float32" in reason(model)


# -- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("variant", ["qwen3-moe", "gpt-oss", "mixtral"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_experts(variant, implementation):
    model = family_model(variant)
    model.set_experts_implementation(implementation)
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([33, 17, 4]), max_new_tokens=10)


def test_an_experts_implementation_of_the_users_own():
    ALL_EXPERTS_FUNCTIONS.register("mine", lambda self, hidden, *args: hidden)
    try:
        model = hf_paged.enable(family_model("qwen3-moe"))
        model.config._experts_implementation = "mine"
        assert "experts implementation 'mine'" in reason(model)
    finally:
        del ALL_EXPERTS_FUNCTIONS._global_mapping["mine"]


# -- lengths and constants -----------------------------------------------------------------------------------------


def test_longrope_beyond_the_original_length_goes_to_stock_and_back():
    model = family_model("phi3-longrope")
    inputs, long = batch([100, 90]), batch([150, 30])
    assert_falls_back(model, "or the proof of its class, end at 158", **long, max_new_tokens=20)
    hf_paged.enable(model, strict=True)
    expected = assert_native_parity(model, **inputs, max_new_tokens=20)
    stock_after_long = stock_copy(model)
    stock_after_long.generate(**long, max_new_tokens=20)
    assert_same_tensor(stock_after_long.generate(**inputs, max_new_tokens=20), expected)
    hf_paged.enable(model, strict=False)
    with pytest.warns(hf_paged.FallbackWarning, match="end at 158"):
        model.generate(**long, max_new_tokens=20)
    assert_native_parity(model, expected, **inputs, max_new_tokens=20)


def test_rope_parameters_taken_out_of_the_config_afterwards():
    """Stock's rotary module has its frequencies by then."""
    model = hf_paged.enable(family_model("llama"), strict=True)
    model.config.rope_parameters = None
    assert_native_parity(model, **batch([30, 9]), **OPTIONS)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_dynamic_frequencies_that_a_longer_call_changed(variant):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = family_model(variant, rope_parameters=rope, max_position_embeddings=160)
    hf_paged.enable(model)
    inputs = batch([30, 9])
    expected = assert_native_parity(model, **inputs, max_new_tokens=20)
    with pytest.warns(hf_paged.FallbackWarning, match=r"beyond 160 the model's frequencies|end at 158"):
        model.generate(**batch([150, 50]), max_new_tokens=20)
    assert_native_parity(model, expected, **inputs, max_new_tokens=20)


@pytest.mark.parametrize(("variant", "change"), [
    ("qwen3-moe", lambda model: setattr(model.model.layers[0].mlp.gate, "top_k", 4)),
    ("granite", lambda model: setattr(model.config, "logits_scaling", -1.0)),
    ("ministral3", lambda model: model.config.rope_parameters.update(llama_4_scaling_beta=3.0)),
])
def test_a_changed_constant_leaves_the_cache_behind(variant, change):
    model = hf_paged.enable(family_model(variant), strict=True)
    inputs = batch([40, 33])
    before = assert_native_parity(model, **inputs, max_new_tokens=10)
    change(model)
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=10), before)


# -- around the call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_lora(variant):
    peft = pytest.importorskip("peft")
    model, inputs = family_model(variant), batch([40, 33, 7])
    plain = model.generate(**inputs, **OPTIONS)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    adapted = wrapped.generate(**inputs, **OPTIONS)
    assert not torch.equal(adapted, plain)
    assert hf_paged.enable(wrapped, strict=True) is wrapped
    assert_native_tokens(wrapped, adapted, inputs, **OPTIONS)
    with wrapped.disable_adapter():
        assert_native_tokens(wrapped, plain, inputs, **OPTIONS)
    assert_native_tokens(wrapped, adapted, inputs, **OPTIONS)


def test_the_implementation_is_restored_after_an_exception(monkeypatch):
    model, inputs = hf_paged.enable(family_model("gemma2")), batch([20, 7])
    name = model.config._attn_implementation
    expected = stock_generate(model, **inputs, **OPTIONS)
    seen = []

    def broken(*args):
        seen.append(model.config._attn_implementation)
        raise ValueError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(paged_calls, "store_kv", broken)
        with pytest.raises(ValueError, match="broken on purpose"):
            model.generate(**inputs, **OPTIONS)
    assert seen
    assert set(seen) == {paged_calls.NAME}
    assert model.config._attn_implementation == name
    assert not paged_calls._switched
    assert_native_parity(model, expected, **inputs, **OPTIONS)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_plain_forward_beside_a_paged_call_is_stocks(implementation):
    """Another thread's, in the middle of a step: padded, with a mask and a window."""
    model, inputs = family_model("mistral"), batch([30, 9])
    model.set_attn_implementation(implementation)
    expected = model(**inputs).logits
    results = []
    with paged_calls.paged_call([model.config]):
        assert model.config._attn_implementation == paged_calls.NAME
        assert paged_calls.implementation_of(model.config) == implementation
        thread = threading.Thread(target=lambda: results.append(model(**inputs).logits))
        thread.start()
        thread.join()
    assert torch.equal(results[0], expected)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), copy.copy])
def test_a_copy_made_in_a_paged_call_is_stocks(make, implementation):
    """As a thread makes it that saves or averages weights while another generates."""
    model, inputs = family_model("mistral"), batch([30, 9])
    model.config._attn_implementation = implementation
    expected = model(**inputs).logits
    with paged_calls.paged_call([model.config]):
        copied = make(model)
        copied.config = copied.model.config = make(copied.config)
        text = model.config.to_json_string()
        assert torch.equal(copied(**inputs).logits, expected)
    assert paged_calls.NAME not in text
    assert paged_calls.implementation_of(copied.config) == implementation
    assert torch.equal(copied(**inputs).logits, expected)
    if make is not copy.copy:  # which shares what it holds
        assert type(copied.config._attn_implementation) is type(implementation)
        assert copied.model.layers[0].self_attn.config._attn_implementation == implementation
        tokens = stock_generate(model, **inputs, **OPTIONS)
        assert_native_parity(hf_paged.enable(copied, strict=True), tokens, **inputs, **OPTIONS)


def test_a_plain_forward_that_cannot_be_told_apart_is_refused():
    model = family_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with paged_calls.paged_call([model.config]), pytest.raises(RuntimeError, match="'flash_attention_2' met a paged"):
        model(**batch([9]))


def test_two_calls_of_one_config_end_with_what_it_said_first():
    config = family_model("llama").config
    first, second = paged_calls.paged_call([config]), paged_calls.paged_call([config])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config._attn_implementation == paged_calls.NAME
    second.__exit__(None, None, None)
    assert config._attn_implementation == "sdpa"
    assert not paged_calls._switched


def test_an_argument_that_pages_do_not_know_is_not_left_out(monkeypatch):
    model = hf_paged.enable(family_model("olmo2"))
    attend = paged_calls._paged_attention
    monkeypatch.setattr(paged_calls, "_paged_attention", lambda *args, **kw: attend(*args, **kw, position_bias=1.0))
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"Olmo2Attention asks .* do not have: position_bias"):
        model.generate(**batch([9]), **OPTIONS)
