"""`PeftModel.generate(adapter_names=...)`: an adapter for every row, by the hooks that PEFT puts on layers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from family_models import VARIANTS, family_model
from outlines import outlined
from support import (
    HostMemory,
    assert_falls_back,
    assert_lockstep,
    assert_native_tokens,
    assert_near,
    assert_same_but_for_near_ties,
    assert_same_tensor,
    batch,
    num_calls,
    random_prompts,
    run_out,
    stock_copy,
    tiny_model,
)
from transformers import GenerationConfig, LogitsProcessorList

import hf_paged
from hf_paged.guards.hooks import naming
from hf_paged.models import fused, linears
from hf_paged.models.tuners import wraps_experts

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import lora_config, randomize, with_adapter  # noqa: E402


@pytest.fixture(params=["modules", "tables"], autouse=True)
def way(request, monkeypatch):
    """As on a CPU, where layers are called as they stand; and as with kernels, which their references stand in for."""
    if request.param == "tables":
        monkeypatch.setattr(fused, "reads_tables", lambda device: True)
        monkeypatch.setattr(linears, "adjacent_memory", HostMemory)


INPUTS = batch([40, 33, 7, 33])
NAMES = ["one", "two", "__base__", "two"]
OPTIONS = {"max_new_tokens": 8}


def _two_adapters(model: Any = None) -> Any:
    """"one" on the linear layers; "two" on fewer of them, and on embedding and head."""
    wrapped = with_adapter(tiny_model() if model is None else model, "one", 5)
    return with_adapter(wrapped, "two", 6, ("q_proj", "k_proj", "embed_tokens", "lm_head"))


@pytest.mark.parametrize("active", ["one", "two", ["one", "two"]])
def test_rows_are_stocks_whatever_is_active(active):
    wrapped = _two_adapters()
    wrapped.base_model.set_adapter(active)
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    plain = wrapped.generate(**INPUTS, **OPTIONS)
    assert (expected != plain).any(dim=1).sum() >= 2
    hf_paged.enable(wrapped, strict=True)
    assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=NAMES)
    assert_native_tokens(wrapped, plain, INPUTS, **OPTIONS)  # the hooks are gone
    assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=tuple(NAMES))
    assert num_calls(wrapped) == {"native": 3}
    assert hf_paged.explain(wrapped, **INPUTS, **OPTIONS, adapter_names=NAMES).path == "native"
    assert hf_paged.explain(wrapped, **OPTIONS, adapter_names=NAMES).path == "native"


@pytest.mark.each_value
@pytest.mark.parametrize("family", VARIANTS)
def test_every_family(family):
    """Fused families by their own code, the others by stock's modules with the layers called row by row."""
    model = family_model(family)
    linear = [n for n in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
                          "gate_up_proj") if any(name.endswith(f".{n}") and type(module) is torch.nn.Linear
                                                 for name, module in model.named_modules())]
    wrapped = with_adapter(with_adapter(model, "one", 5, linear), "two", 6, linear[:2])
    if hf_paged.explain(wrapped, **INPUTS, **OPTIONS).path != "native":
        pytest.skip("LoRA of this family runs in stock")
    if any(wraps_experts(module) for module in wrapped.modules()):  # PEFT makes `target_parameters` of these layers
        pytest.skip("PEFT has no rows of adapters on experts")
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    assert not torch.equal(expected, wrapped.generate(**INPUTS, **OPTIONS))
    hf_paged.enable(wrapped, strict=True)
    assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=NAMES)
    plain = wrapped.generate(**INPUTS, **OPTIONS)
    hf_paged.disable(wrapped)
    assert_same_tensor(plain, wrapped.generate(**INPUTS, **OPTIONS))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [{"use_rslora": True}, {"lora_bias": True}, {"layers_to_transform": [1]},
                                  {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3}}])
def test_kinds_of_lora(kind):
    wrapped = with_adapter(_two_adapters(), "three", 7, **kind)
    names = ["three", "two", "one", "__base__"]
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=names)
    hf_paged.enable(wrapped, strict=True)
    assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=names)


@pytest.mark.parametrize("name", ["two", "__base__"])
def test_a_request_whose_rows_pefts_layers_refuse_harms_no_other(name):
    """Weights of linear layers among `target_parameters` of another adapter than the one that is named."""
    wrapped = with_adapter(outlined(family_model("mixtral")), "one", 5, ("o_proj",),
                           target_parameters=["q_proj.weight"])
    with_adapter(wrapped, "two", 6, ("v_proj",))
    model, options = wrapped.get_base_model(), GenerationConfig(**OPTIONS, do_sample=False)
    expected = wrapped.generate(torch.tensor([[5, 6, 7]]), options)[0, 3:].tolist()
    engine = hf_paged.get_engine(hf_paged.enable(model))
    engine.add_request([5, 6, 7], options)
    with pytest.raises(ValueError, match=r"q_proj is a .*ParamWrapper, which is not run for single rows"):
        engine.add_request([5, 6, 7], options, adapter_name=name)
    outputs = run_out(engine)
    assert outputs[-1].completion.token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_over_bfloat16_weights(dtype):
    """Logits are as near to those of float32 as stock's are."""
    wrapped = _two_adapters(tiny_model().to(torch.bfloat16))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    options = {"max_new_tokens": 1, "adapter_names": NAMES * 3, "return_dict_in_generate": True, "output_logits": True}
    exact, stock = stock_copy(wrapped).float(), stock_copy(wrapped)
    hf_paged.enable(wrapped, strict=True)
    errors = []
    for seed in range(8):
        logits = [m.generate(**batch([40, 33, 7, 33] * 3, seed=seed), **options).logits[0].float()
                  for m in (exact, wrapped, stock)]
        errors.append([(of - logits[0]).square().mean() for of in logits[1:]])
    ours, stocks = torch.tensor(errors).mean(0).sqrt()
    assert ours <= 1.1 * stocks
    assert 0 < stocks < 0.1 * logits[0].std()


def _as_it_is(ids: Any, scores: Any) -> Any:
    return scores


@pytest.mark.each_value
@pytest.mark.parametrize("options", [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True},
    {"num_beams": 2, "do_sample": True, "top_k": 20},
    {"return_dict_in_generate": True, "output_logits": True, "output_scores": True},
    {"do_sample": True, "top_k": 20, "logits_processor": LogitsProcessorList([_as_it_is])},
], ids=lambda options: next(iter(options)))
def test_in_lockstep(options):
    """PEFT repeats the names for beams; draws are torch's there."""
    assert_lockstep(_two_adapters(), **INPUTS, **OPTIONS, **options, adapter_names=NAMES)


def test_prompt_lookup_in_lockstep():
    ids = torch.tensor([random_prompts([12])[0] * 3])
    assert_lockstep(_two_adapters(), input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
                    prompt_lookup_num_tokens=3, adapter_names=["two"])


def test_the_cache_that_a_call_returns_is_the_rows_own():
    """Keys and values of rows under their adapters, which no plain forward computes later."""
    wrapped = _two_adapters()
    options = {**INPUTS, **OPTIONS, "adapter_names": NAMES, "return_dict_in_generate": True}
    expected = wrapped.generate(**options)
    hf_paged.enable(wrapped, strict=True)
    actual = wrapped.generate(**options)
    assert num_calls(wrapped) == {"lockstep": 1}
    real = torch.nn.functional.pad(INPUTS["attention_mask"], (0, 7), value=1).bool()
    for ours, stocks in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for name in ("keys", "values"):
            a, b = getattr(ours, name).transpose(1, 2)[real], getattr(stocks, name).transpose(1, 2)[real]
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert wrapped.generate(**options, use_cache=False).get("past_key_values") is None
    assert num_calls(wrapped) == {"lockstep": 1, "native": 1}


def test_the_cache_under_autocast_is_the_rows_own():
    """It is computed once somebody looks, when the call's hooks are gone and maybe those of another are there."""
    wrapped = _two_adapters()
    options = {**INPUTS, **OPTIONS, "adapter_names": NAMES, "return_dict_in_generate": True}
    with torch.autocast("cpu", torch.bfloat16):
        expected = wrapped.generate(**options, output_logits=True)
        hf_paged.enable(wrapped, strict=True)
        actual = wrapped.generate(**options)
    assert num_calls(wrapped) == {"lockstep": 1}
    assert_same_but_for_near_ties(actual.sequences, expected)
    same = (actual.sequences == expected.sequences).cumprod(1).bool()  # keys and values of the same tokens
    real = torch.nn.functional.pad(INPUTS["attention_mask"], (0, 7), value=1).bool() & same[:, :-1]
    with naming([m for m in wrapped.modules() if hasattr(m, "lora_A")], NAMES[::-1]):
        layers = actual.past_key_values.layers
    for ours, stocks in zip(layers, expected.past_key_values.layers, strict=True):
        for name in ("keys", "values"):
            a, b = getattr(ours, name).transpose(1, 2)[real], getattr(stocks, name).transpose(1, 2)[real]
            assert_near(a, b, 0.05)


def test_names_of_sequences_that_are_returned_for_a_prompt():
    """One name for each row that the model sees, as PEFT has it; fewer are PEFT's error."""
    wrapped = _two_adapters()
    options = {**INPUTS, **OPTIONS, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    names = [name for name in NAMES for _ in range(2)]
    expected = wrapped.generate(**options, adapter_names=names)
    hf_paged.enable(wrapped, strict=True)
    assert_same_tensor(wrapped.generate(**options, adapter_names=names), expected)
    hf_paged.enable(wrapped, strict=False)
    with pytest.warns(hf_paged.FallbackWarning, match="4 adapter_names for 8 rows"), \
            pytest.raises(ValueError, match="Length of `adapter_names`"):
        wrapped.generate(**options, adapter_names=NAMES)
    _leave_hooks(wrapped)


def _leave_hooks(wrapped: Any) -> None:
    """PEFT takes its hooks off only after calls that return."""
    for module in wrapped.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()


def test_an_unknown_name_is_pefts_error():
    wrapped = _two_adapters()
    hf_paged.enable(wrapped, strict=True)
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): nope"):
        wrapped.generate(**INPUTS, **OPTIONS, adapter_names=["one", "nope", "two", "one"])
    assert not num_calls(wrapped)


def test_merged_adapters_are_pefts_error():
    wrapped = _two_adapters()
    wrapped.merge_adapter(["one"])
    hf_paged.enable(wrapped)
    with pytest.warns(hf_paged.FallbackWarning, match=r"one is merged into"), \
            pytest.raises(ValueError, match="Cannot pass `adapter_names` when there are merged adapters"):
        wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)


def test_dora_is_pefts_error_and_beside_it_rows_of_others_are_native():
    wrapped = with_adapter(_two_adapters(), "dora", 7, ("v_proj",), use_dora=True)
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    hf_paged.enable(wrapped)
    assert_native_tokens(wrapped, expected, INPUTS, **OPTIONS, adapter_names=NAMES)
    with pytest.warns(hf_paged.FallbackWarning, match="'dora' is a Dora"), pytest.raises(ValueError, match="DoRA"):
        wrapped.generate(**INPUTS, **OPTIONS, adapter_names=["dora", "one", "two", "one"])


def test_adapters_that_are_switched_off_are_stocks():
    """In a layer that is switched off PEFT passes over the names."""
    wrapped = _two_adapters()
    next(m for m in wrapped.modules() if hasattr(m, "lora_A")).enable_adapters(False)
    assert_falls_back(wrapped, "are switched off", **INPUTS, **OPTIONS, adapter_names=NAMES)


def test_a_hook_that_only_looks_like_pefts():
    """Another function under the same name, and PEFT's own over another layer."""
    wrapped = _two_adapters()
    hf_paged.enable(wrapped, strict=True)
    layer = next(m for m in wrapped.modules() if hasattr(m, "lora_A"))

    def _adapter_names_pre_forward_hook(target, args, kwargs, adapter_names):
        kwargs["adapter_names"] = adapter_names[::-1]
        return args, kwargs

    from functools import partial

    from peft.tuners.lora import model as home

    for module, function in ((layer, _adapter_names_pre_forward_hook),
                             (wrapped.get_base_model().model.norm, home._adapter_names_pre_forward_hook)):
        handle = module.register_forward_pre_hook(partial(function, adapter_names=NAMES), with_kwargs=True)
        with pytest.raises(hf_paged.FallbackError, match="has a forward hook"):
            wrapped.generate(**INPUTS, **OPTIONS)
        handle.remove()
    wrapped.generate(**INPUTS, **OPTIONS)


def test_pefts_own_code_that_was_patched(monkeypatch):
    """Ours stands for it in rows that name an adapter."""
    wrapped = _two_adapters()
    hf_paged.enable(wrapped)
    wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    kind = peft.tuners.lora.Linear
    stock = kind._mixed_batch_forward
    monkeypatch.setattr(kind, "_mixed_batch_forward", lambda self, *args, **kwargs: -stock(self, *args, **kwargs))
    with pytest.warns(hf_paged.FallbackWarning, match="._mixed_batch_forward is patched"):
        wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)


def test_hooks_on_some_layers_only():
    wrapped = _two_adapters()
    hf_paged.enable(wrapped, strict=True)
    layers = [m for m in wrapped.modules() if hasattr(m, "lora_A")]
    with naming(layers, NAMES):
        layers[3]._forward_pre_hooks.popitem()
        with pytest.raises(hf_paged.FallbackError, match="hooks for different adapter_names"):
            wrapped.get_base_model().generate(**INPUTS, **OPTIONS)


def test_hooks_of_two_calls_at_once():
    """Whose names count, nobody can tell; equal ones are no question."""
    wrapped = _two_adapters()
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    hf_paged.enable(wrapped, strict=True)
    layers = [m for m in wrapped.modules() if hasattr(m, "lora_A")]
    with naming(layers, NAMES[::-1]), naming(layers, NAMES), pytest.raises(hf_paged.FallbackError, match="different"):
        wrapped.get_base_model().generate(**INPUTS, **OPTIONS)
    with naming(layers, NAMES), naming(layers, NAMES):
        assert_same_tensor(wrapped.get_base_model().generate(**INPUTS, **OPTIONS), expected)


def test_hooks_of_one_call_and_requests_that_run_meanwhile():
    """A request of the engine goes on under the active adapters while somebody's call has its hooks on the layers."""
    wrapped = _two_adapters()
    prompt = random_prompts([20], seed=3)[0]
    alone = wrapped.generate(torch.tensor([prompt]), max_new_tokens=30)[0, 20:].tolist()
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    hf_paged.enable(wrapped, strict=True)
    engine = hf_paged.get_engine(wrapped)
    engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
    tokens = [t for _ in range(4) for output in engine.step() for t in output.new_token_ids]
    assert_same_tensor(wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES), expected)
    with naming([m for m in wrapped.modules() if hasattr(m, "lora_A")], ["two"]):
        tokens += [t for _ in range(3) for output in engine.step() for t in output.new_token_ids]
        engine.add_request(prompt, GenerationConfig(max_new_tokens=30), request_id="under hooks")
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
    assert [completion.token_ids for completion in done.values()] == [alone, alone]


def test_callers_in_threads_of_whom_one_names_adapters():
    """The names are one call's; a `PagedGenerator` beside it has the active adapters."""
    wrapped = _two_adapters()
    prompts = random_prompts([20, 9], seed=3)
    plain = [wrapped.generate(torch.tensor([p]), max_new_tokens=12)[0, len(p):].tolist() for p in prompts]
    expected = wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    with hf_paged.PagedGenerator(wrapped, num_blocks=256, strict=True) as generator:
        failures: list[Any] = []

        def other() -> None:
            for _ in range(6):
                made = [c.token_ids for c in generator.generate(prompts, max_new_tokens=12)]
                if made != plain:
                    failures.append(made)

        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(4):
            assert_same_tensor(wrapped.generate(**INPUTS, **OPTIONS, adapter_names=NAMES), expected)
        thread.join()
        assert not failures


def test_lora_injected_into_a_bare_model(any_peft):
    """By transformers' `add_adapter`: no PeftModel is there to name adapters; a tuner of PEFT's and our calls do."""
    model = tiny_model()
    for seed, name in ((5, "one"), (6, "two")):
        model.add_adapter(lora_config(), adapter_name=name)
        randomize(model, name, seed)
    model.eval()
    reference = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)
    expected = reference.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    with pytest.raises(ValueError, match="adapter_names"):
        model.generate(**INPUTS, **OPTIONS, adapter_names=NAMES)
    with hf_paged.PagedGenerator(model, num_blocks=256, strict=True) as generator:
        assert_same_tensor(generator.generate(**INPUTS, **OPTIONS, adapter_names=NAMES), expected)
    tuner = reference.base_model
    hf_paged.enable(reference, strict=True)
    with tuner._enable_peft_forward_hooks(adapter_names=NAMES):
        assert_same_tensor(tuner.generate(**INPUTS, **OPTIONS), expected)
    assert num_calls(reference) == {"native": 1}
