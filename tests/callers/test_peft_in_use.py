"""PEFT as programs use it: adapters from disk, transformers' own adapter methods, trained adapters, prompt learning.

`tests/integration/test_peft.py` has adapters on, off, switched, merged, scaled, and their place in the prefix cache.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import assert_native_parity, assert_native_tokens, assert_same_tensor, batch, tiny_model

import hf_paged

peft = pytest.importorskip("peft", reason="an extra of the test environment")

INPUTS = batch([70, 40, 7])  # 64 + 32 + 0 tokens in full blocks
CACHED = 64 + 32
OPTIONS = {"max_new_tokens": 8}


def _config(**overrides: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj", "down_proj"]}
    return peft.LoraConfig(**(settings | {"task_type": "CAUSAL_LM"} | overrides))


def _randomize(model: Any, name: str, seed: int) -> None:
    """LoRA's B is zero at first and would change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if f".{name}." in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _two_adapters(model: Any) -> Any:
    wrapped = peft.get_peft_model(model, _config(), adapter_name="one")
    wrapped.add_adapter("two", _config())
    _randomize(wrapped, "one", 5)
    _randomize(wrapped, "two", 6)
    return wrapped.eval()


def _falls_back(call: Any) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    reasons = [str(w.message) for w in caught if issubclass(w.category, hf_paged.FallbackWarning)]
    assert len(reasons) == 1, reasons
    return result, reasons[0]


def test_each_adapter_finds_its_own_prefixes_again():
    """Around and around: the first visit of an adapter (or of none) hits nothing, every later one hits all it can."""
    wrapped = _two_adapters(tiny_model())
    model = wrapped.get_base_model()
    engine = hf_paged.get_engine(hf_paged.enable(wrapped, strict=True))
    outputs: dict[str, list[torch.Tensor]] = {"one": [], "two": [], "none": []}
    hits = []
    for _ in range(3):
        for name in ("one", "two", "none"):
            before = engine.stats().prefix_cache_hits
            if name == "none":
                with wrapped.disable_adapter():
                    outputs[name].append(assert_native_parity(model, **INPUTS, **OPTIONS))
            else:
                wrapped.set_adapter(name)
                outputs[name].append(assert_native_parity(model, **INPUTS, **OPTIONS))
            hits.append(engine.stats().prefix_cache_hits - before)
    assert hits == [0, 0, 0] + [CACHED] * 6
    assert len({str(outputs[name][0]) for name in outputs}) == 3


def test_rows_of_different_adapters_and_native_calls_around_them():
    """`adapter_names` hooks the layers for one call; what is cached before and after belongs to the active adapter."""
    wrapped = _two_adapters(tiny_model())
    rows = {"one": 0, "two": 1, "__base__": 2}
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=list(rows))
    one = wrapped.generate(**INPUTS, **OPTIONS)
    assert torch.equal(expected[0], one[0])
    assert not torch.equal(expected[1], one[1])
    hf_paged.enable(wrapped)
    assert_native_tokens(wrapped, one, INPUTS, **OPTIONS)
    before = hf_paged.get_engine(wrapped).stats().prefix_cache_hits
    for _ in range(2):
        assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=list(rows))
    # The second time: row "two" alone, since "__base__" is too short for a block and "one" hits on its own.
    assert hf_paged.get_engine(wrapped).stats().prefix_cache_hits - before == CACHED
    before = hf_paged.get_engine(wrapped).stats().prefix_cache_hits
    assert_native_tokens(wrapped, one, INPUTS, **OPTIONS)
    assert hf_paged.get_engine(wrapped).stats().prefix_cache_hits - before == CACHED


def test_adapters_saved_loaded_around_an_enabled_model_combined_and_deleted(tmp_path):
    source = _two_adapters(tiny_model())
    source.save_pretrained(tmp_path)
    expected = {}
    for name in ("one", "two"):
        source.set_adapter(name)
        expected[name] = source.generate(**INPUTS, **OPTIONS)
    source.add_weighted_adapter(["one", "two"], [0.7, 0.4], "both", combination_type="cat")
    source.set_adapter("both")
    expected["both"] = source.generate(**INPUTS, **OPTIONS)

    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "one", adapter_name="one").eval()
    assert_native_tokens(wrapped, expected["one"], INPUTS, **OPTIONS)
    wrapped.load_adapter(tmp_path / "two", adapter_name="two")
    assert_native_tokens(wrapped, expected["one"], INPUTS, **OPTIONS)
    wrapped.set_adapter("two")
    assert_native_tokens(wrapped, expected["two"], INPUTS, **OPTIONS)
    wrapped.add_weighted_adapter(["one", "two"], [0.7, 0.4], "both", combination_type="cat")
    wrapped.set_adapter("both")
    assert_native_tokens(wrapped, expected["both"], INPUTS, **OPTIONS)
    wrapped.delete_adapter("both")
    wrapped.set_adapter("one")
    assert_native_tokens(wrapped, expected["one"], INPUTS, **OPTIONS)
    # the same name again, other weights: what was cached under that name is stale
    wrapped.delete_adapter("two")
    wrapped.load_adapter(tmp_path / "one", adapter_name="two")
    wrapped.set_adapter("two")
    assert_native_tokens(wrapped, expected["one"], INPUTS, **OPTIONS)


def test_transformers_own_adapter_methods(tmp_path, any_peft):
    """`add_adapter`, `set_adapter`, `disable_adapters` of the model itself, without a PeftModel around it."""
    model = hf_paged.enable(tiny_model(), strict=True)
    plain = assert_native_parity(model, **INPUTS, **OPTIONS)
    model.add_adapter(_config(), adapter_name="one")
    model.add_adapter(_config(), adapter_name="two")
    _randomize(model, "one", 5)
    _randomize(model, "two", 6)
    model.eval()
    outputs = [plain]
    for name in ("one", "two"):
        model.set_adapter(name)
        outputs.append(assert_native_parity(model, **INPUTS, **OPTIONS))
    model.disable_adapters()
    assert_native_parity(model, plain, **INPUTS, **OPTIONS)
    model.enable_adapters()
    assert_native_parity(model, outputs[2], **INPUTS, **OPTIONS)
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])
    model.save_pretrained(tmp_path)
    model.delete_adapter("two")
    model.set_adapter("one")
    assert_native_parity(model, outputs[1], **INPUTS, **OPTIONS)
    model.load_adapter(str(tmp_path), adapter_name="three")
    model.set_adapter("three")
    assert_native_parity(model, outputs[2], **INPUTS, **OPTIONS)


@pytest.mark.parametrize("fused", [False, True])
def test_a_trained_adapter_generates_with_its_new_weights(fused):
    """Only the adapter moves; a fused optimizer writes without telling anyone."""
    wrapped = _two_adapters(tiny_model())
    model = wrapped.get_base_model()
    hf_paged.enable(wrapped, strict=True)
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=0.1, fused=fused)
    ids, outputs = INPUTS["input_ids"][:1], []
    for _ in range(3):
        outputs.append(assert_native_parity(model, **INPUTS, **OPTIONS))
        wrapped.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wrapped.eval()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


@pytest.mark.parametrize(("overrides", "reason"), [
    ({"use_rslora": True}, None),
    ({"lora_bias": True}, None),
    ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3}}, None),
    ({"layers_to_transform": [1]}, None),
    ({"target_modules": "all-linear"}, None),
    ({"modules_to_save": ["lm_head", "embed_tokens"]}, None),
    ({"modules_to_save": ["norm"]}, "norm is a peft.utils.other.ModulesToSaveWrapper, not transformers' own"),
    ({"trainable_token_indices": [5, 9]}, "embed_tokens is a peft.utils.other.TrainableTokensWrapper"),
])
def test_kinds_of_lora(overrides, reason):
    wrapped = peft.get_peft_model(tiny_model(), _config(**overrides), adapter_name="one").eval()
    _randomize(wrapped, "one", 5)
    plain = tiny_model().generate(**INPUTS, **OPTIONS)
    expected = wrapped.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(expected, plain)
    hf_paged.enable(wrapped)
    if reason is None:
        assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS)
        return
    actual, message = _falls_back(lambda: wrapped.generate(**INPUTS, **OPTIONS))
    assert_same_tensor(actual, expected)
    assert reason in message


@pytest.mark.parametrize("config", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_prompt_learning_names_its_reason_and_a_bare_call_is_native(config):
    """With the virtual tokens: stock, for the reason given. The model inside, without them: native."""
    model = tiny_model()
    plain = model.generate(**INPUTS, **OPTIONS)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.mul_(3.0)
    expected = wrapped.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(expected, plain)
    hf_paged.enable(wrapped)
    actual, message = _falls_back(lambda: wrapped.generate(**INPUTS, **OPTIONS))
    assert_same_tensor(actual, expected)
    assert "prompt learning" in message
    assert_native_parity(model, plain, **INPUTS, **OPTIONS)
    with wrapped.disable_adapter():
        assert_native_tokens(wrapped, plain, INPUTS, **OPTIONS)
