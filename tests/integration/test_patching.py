"""`enable` and `disable`: the object stays the caller's, and nothing but `generate` changes."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import warnings
import weakref
from pathlib import Path

import peft
import pytest
import torch
from support import (
    assert_falls_back,
    assert_native_parity,
    assert_same_tensor,
    batch,
    stock_copy,
    stock_generate,
    tiny_config,
    tiny_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3Model

import hf_paged
from hf_paged import FallbackWarning, UnsupportedModelError


def logits(model, seed=1):
    inputs = batch([20, 7], seed=seed)
    with torch.no_grad():
        return model(**inputs).logits


# -- the object ----------------------------------------------------------------------------------------------------------


def test_enable_returns_the_very_object_and_disable_restores_it():
    model = tiny_model()
    attributes, before, forward = set(vars(model)), logits(model), type(model).forward
    assert hf_paged.enable(model) is model
    assert hf_paged.is_enabled(model)
    assert set(vars(model)) == attributes
    assert isinstance(model, Qwen3ForCausalLM)
    assert (type(model).__name__, type(model).__module__) == ("Qwen3ForCausalLM", Qwen3ForCausalLM.__module__)
    assert type(model).__qualname__ == "Qwen3ForCausalLM"
    assert type(model).forward is forward
    assert torch.equal(logits(model), before)
    model.generate(**batch([20, 7]), max_new_tokens=5)
    assert torch.equal(logits(model), before)
    assert hf_paged.disable(model) is model
    assert type(model) is Qwen3ForCausalLM
    assert set(vars(model)) == attributes
    assert not hf_paged.is_enabled(model)
    assert torch.equal(logits(model), before)


def test_enabling_and_generating_leaves_every_tensor_and_submodule_in_place():
    model = tiny_model()
    tensors = {n: (t, t.clone(), t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()}
    modules = {n: (m, type(m), set(vars(m))) for n, m in model.named_modules()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    hf_paged.enable(model, strict=True).generate(**batch([20, 7]), max_new_tokens=5)
    hf_paged.disable(model)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    for name, (tensor, content, pointer) in tensors.items():
        assert after[name] is tensor
        assert torch.equal(tensor, content)
        assert tensor.data_ptr() == pointer
    for name, module in model.named_modules():
        assert (module, type(module), set(vars(module))) == modules[name]
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


def test_state_dict_keys_are_the_same_while_enabled():
    model = tiny_model(tie_word_embeddings=True)
    keys = list(model.state_dict())
    hf_paged.enable(model)
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock_copy(model).named_parameters()]


def test_generate_after_disable_is_stocks():
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=9)
    hf_paged.enable(model)
    engine = hf_paged.get_engine(model)
    hf_paged.disable(model)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=9), expected)
    assert engine.stats().num_generated_tokens == 0


def test_enabling_twice_keeps_the_engine_unless_settings_are_given():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    hf_paged.enable(model)
    assert hf_paged.get_engine(model) is engine
    hf_paged.enable(model, block_size=32)
    assert hf_paged.get_engine(model) is not engine
    assert hf_paged.get_engine(model).config.block_size == 32
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)
    hf_paged.disable(model)
    assert type(model) is Qwen3ForCausalLM


def test_enable_disable_round_and_round():
    model = tiny_model()
    for _ in range(3):
        hf_paged.enable(model, strict=True)
        assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)
        hf_paged.disable(model)
        hf_paged.disable(model)
        assert type(model) is Qwen3ForCausalLM


def test_two_models_have_two_engines_and_one_class():
    first, second = hf_paged.enable(tiny_model(0), strict=True), hf_paged.enable(tiny_model(1), strict=True)
    assert type(first) is type(second)
    assert hf_paged.get_engine(first) is not hf_paged.get_engine(second)
    assert_native_parity(first, **batch([20, 7]), max_new_tokens=5)
    assert_native_parity(second, **batch([20, 7]), max_new_tokens=5)
    hf_paged.disable(first)
    assert hf_paged.is_enabled(second)


def test_a_config_and_overrides_are_merged():
    model = hf_paged.enable(tiny_model(), hf_paged.PagedConfig(block_size=32, strict=True), max_num_seqs=7)
    config = hf_paged.get_engine(model).config
    assert (config.block_size, config.strict, config.max_num_seqs) == (32, True, 7)


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    ({"block_size": 17}, ValueError, "block_size=17"),
    ({"blocksize": 16}, TypeError, "blocksize"),
    ({"config": {"block_size": 16}}, TypeError, "PagedConfig"),
])  # fmt: skip
def test_a_wrong_setting_leaves_the_model_as_it_was(kwargs, error, message):
    model = tiny_model()
    with pytest.raises(error, match=message):
        hf_paged.enable(model, **kwargs)
    assert type(model) is Qwen3ForCausalLM
    assert not hf_paged.is_enabled(model)


def test_a_wrong_setting_leaves_an_enabled_model_enabled_as_it_was():
    model = hf_paged.enable(tiny_model(), block_size=32)
    engine = hf_paged.get_engine(model)
    with pytest.raises(ValueError, match="block_size"):
        hf_paged.enable(model, block_size=5)
    assert hf_paged.get_engine(model) is engine


@pytest.mark.parametrize("make", [
    pytest.param(lambda: nn.Linear(3, 3), id="linear"),
    pytest.param(lambda: "Qwen/Qwen3-8B", id="str"),
    pytest.param(lambda: None, id="none"),
    pytest.param(lambda: Qwen3ForCausalLM, id="class"),
    pytest.param(lambda: Qwen3Model(tiny_config()), id="body without head"),
    pytest.param(lambda: nn.Sequential(tiny_model()), id="unknown wrapper"),
    pytest.param(lambda: nn.DataParallel(nn.Linear(3, 3)), id="wrapped linear"),
    pytest.param(lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    )), id="llama"),
])  # fmt: skip
def test_anything_else_is_refused(make):
    thing = make()
    with pytest.raises(TypeError, match="Qwen3ForCausalLM"):
        hf_paged.enable(thing)
    with pytest.raises(UnsupportedModelError):
        hf_paged.disable(thing)
    with pytest.raises(TypeError):
        hf_paged.get_engine(thing)
    assert not hf_paged.is_enabled(thing)


def test_get_engine_of_a_model_that_is_not_enabled():
    with pytest.raises(ValueError, match="hf_paged.enable"):
        hf_paged.get_engine(tiny_model())


# -- subclasses -----------------------------------------------------------------------------------------------------------


class Louder(Qwen3ForCausalLM):
    """Overrides forward: what the engine would compute is not what this model computes."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


class Renamed(Qwen3ForCausalLM):
    """Adds a method and nothing that matters to generation."""

    def greet(self):
        return "hello"


def _of_class(cls):
    model = cls(tiny_config()).eval()
    model.load_state_dict(tiny_model().state_dict())
    return model


def test_a_subclass_with_its_own_forward_goes_to_stock():
    model = _of_class(Louder)
    expected = assert_falls_back(model, "Louder.forward", **batch([20, 7]), max_new_tokens=8)
    assert not torch.equal(expected, tiny_model().generate(**batch([20, 7]), max_new_tokens=8))
    assert type(model) is Louder


def test_a_subclass_that_leaves_generation_alone_is_native():
    model = hf_paged.enable(_of_class(Renamed), strict=True)
    assert (type(model).__name__, type(model).__module__) == ("Renamed", __name__)
    assert model.greet() == "hello"
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=8)
    hf_paged.disable(model)
    assert type(model) is Renamed


def test_a_class_swapped_again_after_enable_is_not_undone():
    """FSDP2's `fully_shard` makes a class of its own from the enabled one."""
    model = hf_paged.enable(tiny_model())
    enabled_class = type(model)
    model.__class__ = type("FSDPQwen3ForCausalLM", (nn.Module, enabled_class)[1:], {})
    with pytest.raises(RuntimeError, match="disable"):
        hf_paged.disable(model)
    assert hf_paged.is_enabled(model)
    model.__class__ = enabled_class
    hf_paged.disable(model)
    assert type(model) is Qwen3ForCausalLM


def test_a_class_made_from_the_enabled_one_works_as_stock_where_it_has_no_engine():
    enabled = hf_paged.enable(tiny_model())
    other = tiny_model(1)
    expected = other.generate(**batch([20, 7]), max_new_tokens=5)
    other.__class__ = type(enabled)
    assert_same_tensor(other.generate(**batch([20, 7]), max_new_tokens=5), expected)


# -- copies and checkpoints ------------------------------------------------------------------------------------------------


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def _torch_saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, _pickled, _torch_saved])
@pytest.mark.parametrize("used", [False, True])
def test_copies_are_stock_objects(duplicate, used):
    model = hf_paged.enable(tiny_model())
    if used:
        model.generate(**batch([20, 7]), max_new_tokens=5)
    expected = logits(model)
    copied = duplicate(model)
    assert type(copied) is Qwen3ForCausalLM
    assert not hf_paged.is_enabled(copied)
    assert torch.equal(logits(copied), expected)
    assert hf_paged.is_enabled(model)
    assert_same_tensor(
        copied.generate(**batch([20, 7]), max_new_tokens=5), model.generate(**batch([20, 7]), max_new_tokens=5)
    )


def test_a_pickle_does_not_need_hf_paged():
    data = pickle.dumps(hf_paged.enable(tiny_model()))
    assert b"hf_paged" not in data


def test_a_copy_of_a_tied_model_stays_tied_and_can_be_enabled():
    model = hf_paged.enable(tiny_model(tie_word_embeddings=True), strict=True)
    copied = hf_paged.enable(copy.deepcopy(model), strict=True)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert_native_parity(copied, **batch([20, 7]), max_new_tokens=5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_checkpoints_of_an_enabled_model_are_stocks(tmp_path, tied, used):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "stock")
    hf_paged.enable(model)
    if used:
        model.generate(**batch([20, 7]), max_new_tokens=5)
    model.save_pretrained(tmp_path / "enabled")
    files = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert sorted(p.name for p in (tmp_path / "enabled").iterdir()) == files
    for name in files:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "enabled" / name).read_bytes(), name
    assert json.loads((tmp_path / "enabled" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled").eval()
    assert type(loaded) is Qwen3ForCausalLM
    assert torch.equal(logits(loaded), logits(model))


def test_from_pretrained_through_the_class_of_an_enabled_model(tmp_path):
    model = hf_paged.enable(tiny_model())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert_same_tensor(
        loaded.generate(**batch([20, 7]), max_new_tokens=5), model.generate(**batch([20, 7]), max_new_tokens=5)
    )


def test_an_enabled_model_is_garbage_collected():
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([20, 7]), max_new_tokens=5)
    gone, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None


def test_a_kept_engine_does_not_keep_the_model():
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([20, 7]), max_new_tokens=5)
    engine, gone = hf_paged.get_engine(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="garbage-collected"):
        engine.add_request([1, 2, 3])


# -- dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_while_enabled(dtype):
    """The pool follows the weights; tokens equal stock's in that dtype."""
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 7, 33])
    assert_native_parity(model, **inputs, max_new_tokens=8)
    assert model.to(dtype) is model
    assert hf_paged.is_enabled(model)
    assert_native_parity(model, **inputs, max_new_tokens=8)
    assert_native_parity(model.float(), **inputs, max_new_tokens=8)


def test_weights_of_float64_go_to_stock():
    assert_falls_back(tiny_model().double(), "float64", **batch([20, 7]), max_new_tokens=5)


# -- training -------------------------------------------------------------------------------------------------------------


def _train(model, steps=3, generate=False, **optimizer_options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer_options)
    ids = batch([40, 40])["input_ids"]
    losses = []
    for _ in range(steps):
        if generate:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                model.generate(**batch([20, 7]), max_new_tokens=4)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_an_enabled_model_equals_training_a_stock_copy(options, generate, checkpointing):
    model = tiny_model()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    stock = stock_copy(model)
    hf_paged.enable(model)
    assert _train(model, generate=generate, **options) == _train(stock, **options)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert model.training


def test_gradients_are_stocks_and_generate_leaves_them_alone():
    model = hf_paged.enable(tiny_model(), strict=True)
    stock = stock_copy(model)
    ids = batch([40, 40])["input_ids"]
    for m in (model, stock):
        m(input_ids=ids, labels=ids).loss.backward()
    model.generate(**batch([20, 7]), max_new_tokens=4)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert ours.requires_grad
        assert torch.equal(ours.grad, theirs.grad), name


def test_generate_in_inference_mode_and_then_training():
    """Nothing made under inference mode may be needed by autograd later."""
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 7])
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=4)
    assert_native_parity(model, **inputs, max_new_tokens=6)
    with torch.inference_mode():
        model.generate(**batch([60, 50]), max_new_tokens=30)
    model.train()
    _train(model, steps=1)
    assert_native_parity(model.eval(), **inputs, max_new_tokens=6)


# -- wrappers -------------------------------------------------------------------------------------------------------------


def _lora(model, name="default", seed=5, targets=("q_proj", "v_proj", "down_proj")):
    """LoRA whose B is not zero, so that it changes the answers."""
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config, adapter_name=name) if not isinstance(model, peft.PeftModel) else model
    if wrapped is model:
        wrapped.add_adapter(name, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in wrapped.named_parameters():
            if f".{name}." in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return wrapped.eval()


def _assert_parity_with(wrapped, expected, inputs, **kwargs):
    engine = hf_paged.get_engine(wrapped)
    before = engine.stats().num_generated_tokens
    assert_same_tensor(wrapped.generate(**inputs, **kwargs), expected)
    width = inputs["input_ids"].shape[1]
    assert engine.stats().num_generated_tokens - before == expected[:, width:].numel()


def test_lora_active_disabled_switched_and_merged():
    model = tiny_model()
    inputs = batch([40, 33, 7])
    options = {"max_new_tokens": 8}
    plain = model.generate(**inputs, **options)
    wrapped = _lora(model)
    first = wrapped.generate(**inputs, **options)
    _lora(wrapped, "second", seed=6)
    wrapped.set_adapter("second")
    second = wrapped.generate(**inputs, **options)
    outputs = [plain, first, second]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])

    assert hf_paged.enable(wrapped, strict=True) is wrapped
    assert hf_paged.is_enabled(wrapped)
    assert hf_paged.is_enabled(wrapped.get_base_model())
    _assert_parity_with(wrapped, second, inputs, **options)
    wrapped.set_adapter("default")
    _assert_parity_with(wrapped, first, inputs, **options)
    with wrapped.disable_adapter():
        _assert_parity_with(wrapped, plain, inputs, **options)
    _assert_parity_with(wrapped, first, inputs, **options)
    wrapped.set_adapter("second")
    _assert_parity_with(wrapped, second, inputs, **options)
    wrapped.merge_adapter()
    _assert_parity_with(wrapped, second, inputs, **options)
    wrapped.unmerge_adapter()
    _assert_parity_with(wrapped, second, inputs, **options)
    merged = wrapped.merge_and_unload()
    assert hf_paged.is_enabled(merged)
    _assert_parity_with(merged, second, inputs, **options)
    hf_paged.disable(merged)
    assert type(merged) is Qwen3ForCausalLM


def test_enabling_first_and_wrapping_later():
    model = tiny_model()
    reference = _lora(stock_copy(model))
    inputs = batch([40, 7])
    expected = reference.generate(**inputs, max_new_tokens=8)
    wrapped = _lora(hf_paged.enable(model, strict=True))
    assert hf_paged.is_enabled(wrapped)
    _assert_parity_with(wrapped, expected, inputs, max_new_tokens=8)


def test_two_active_adapters_at_once():
    wrapped = _lora(_lora(tiny_model()), "second", seed=6)
    wrapped.base_model.set_adapter(["default", "second"])
    inputs = batch([40, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    _assert_parity_with(hf_paged.enable(wrapped, strict=True), expected, inputs, max_new_tokens=8)


def test_an_adapter_scaled_anew_does_not_hit_what_was_cached_before():
    wrapped = _lora(tiny_model())
    inputs = batch([40, 7])
    hf_paged.enable(wrapped, strict=True)
    first = wrapped.generate(**inputs, max_new_tokens=8)
    for module in wrapped.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    expected = stock_copy(wrapped).generate(**inputs, max_new_tokens=8)
    assert not torch.equal(expected, first)
    _assert_parity_with(wrapped, expected, inputs, max_new_tokens=8)


def test_lora_on_embeddings_and_head():
    wrapped = _lora(tiny_model(), targets=("embed_tokens", "lm_head", "k_proj"))
    inputs = batch([40, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    _assert_parity_with(hf_paged.enable(wrapped, strict=True), expected, inputs, max_new_tokens=8)


def test_dora_equals_stock():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_model(), config).eval()
    inputs = batch([40, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    hf_paged.enable(wrapped)
    assert_same_tensor(wrapped.generate(**inputs, max_new_tokens=8), expected)


def test_rows_with_different_adapters_go_to_stock():
    wrapped = _lora(_lora(tiny_model()), "second", seed=6)
    names = ["default", "second", "__base__"]
    expected = assert_falls_back(wrapped, "hook", **batch([20, 20, 20]), max_new_tokens=6, adapter_names=names)
    assert expected.shape == (3, 26)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "p"])
def test_prompt_learning_gives_stocks_tokens(kind):
    config = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "p": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }[kind]()
    model = tiny_model()
    inputs = batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.mul_(3.0)
    expected = wrapped.generate(**inputs, max_new_tokens=6)
    assert not torch.equal(expected, plain)
    hf_paged.enable(wrapped)
    with pytest.warns(FallbackWarning):
        actual = wrapped.generate(**inputs, max_new_tokens=6)
    assert_same_tensor(actual, expected)
    hf_paged.enable(wrapped, strict=True)
    with pytest.raises(hf_paged.FallbackError):
        wrapped.generate(**inputs, max_new_tokens=6)


def test_ia3_equals_stock():
    config = peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    wrapped = peft.get_peft_model(tiny_model(), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "ia3" in name:
                parameter.uniform_(0.2, 2.0)
    inputs = batch([20, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=6)
    hf_paged.enable(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert_same_tensor(wrapped.generate(**inputs, max_new_tokens=6), expected)


def test_a_compiled_model():
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    compiled = torch.compile(model, backend="eager")
    assert hf_paged.enable(compiled, strict=True) is compiled
    assert hf_paged.is_enabled(model)
    _assert_parity_with(compiled, expected, inputs, max_new_tokens=6)
    _assert_parity_with(model, expected, inputs, max_new_tokens=6)
    assert torch.allclose(logits(compiled), logits(model), atol=1e-5)
    hf_paged.disable(compiled)
    assert type(model) is Qwen3ForCausalLM


def test_a_model_compiled_in_place():
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    model.compile(backend="eager")
    hf_paged.enable(model)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_ddp(process_group):
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert hf_paged.enable(wrapped, strict=True) is wrapped
    assert hf_paged.is_enabled(model)
    _assert_parity_with(wrapped.module, expected, inputs, max_new_tokens=6)
    ids = inputs["input_ids"]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    hf_paged.disable(wrapped)
    assert type(model) is Qwen3ForCausalLM


def test_lora_in_ddp_in_compile(process_group):
    lora = _lora(tiny_model())
    inputs = batch([20, 7])
    expected = lora.generate(**inputs, max_new_tokens=6)
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(lora), backend="eager")
    hf_paged.enable(wrapped, strict=True)
    _assert_parity_with(lora, expected, inputs, max_new_tokens=6)


def test_synced_gpus_go_to_stock(process_group):
    assert_falls_back(tiny_model(), "synced_gpus", **batch([20, 7]), max_new_tokens=6, synced_gpus=True)


def test_fsdp2_after_enable(process_group):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    hf_paged.enable(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    with pytest.warns(FallbackWarning):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)
    with pytest.raises(RuntimeError, match="disable"):
        hf_paged.disable(model)



def test_stock_generate_of_the_oracle_does_not_use_the_engine():
    """The oracle of every test here is a deep copy: it must never run on the engine it is compared with."""
    model = hf_paged.enable(tiny_model())
    stock_generate(model, **batch([20, 7]), max_new_tokens=6)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 0
