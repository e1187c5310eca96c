"""Code of transformers or torch that a user replaced runs, or the call is refused: it is never passed over."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
import warnings
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from family_models import family_model
from support import (
    assert_falls_back,
    assert_native_parity,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    stock_generate,
    tiny_model,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import hf_paged
from hf_paged.guards.origin import PatchPoint, is_original
from hf_paged.guards.original_classes import of_class
from hf_paged.guards.original_code import OriginalCode
from hf_paged.guards.replaced_forwards import function_inside
from hf_paged.options import table
from hf_paged.options.table import ALWAYS

# A value of each option that stock makes a processor or criterion for, in a model that ends at token 3.
ACTIVE = {
    "sequence_bias": [[[5], 4.0]], "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]],
    "min_length": 30, "min_new_tokens": 3, "forced_bos_token_id": 4, "forced_eos_token_id": 3,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (2, 1.2), "suppress_tokens": [9],
    "begin_suppress_tokens": [9], "renormalize_logits": True, "max_time": 100.0, "stop_strings": ["zz"],
    "eos_token_id": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.7,
    "epsilon_cutoff": 0.02, "eta_cutoff": 0.02,
}
# Options that take effect by a processor of another's, or by none: a length, a choice of sampling, an id of padding,
# guesses that change no token.
WITHOUT_CLASS = {"max_length", "max_new_tokens", "do_sample", "pad_token_id", "num_return_sequences",
                 "prompt_lookup_num_tokens"}
NATIVE = table.names(table.NATIVE)
OPTIONS = {name: kind for name in NATIVE if (kind := table.OPTIONS[name].made) is not None}


def _settings(option: str) -> dict:
    settings = {"max_new_tokens": 5, "eos_token_id": 3, option: ACTIVE[option]}
    if table.OPTIONS[option].only_sampling:
        settings |= {"do_sample": True}
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    if option == "stop_strings":
        settings["tokenizer"] = byte_tokenizer()
    return settings


def _generate(model, settings):
    torch.manual_seed(0)
    return model.generate(**batch([20]), **settings)


def _favouring(function):
    """A criterion's or processor's call that gives other results than its own: token 17, or the end of all rows."""

    def call(self, *args, **kwargs):
        result = function(self, *args, **kwargs)
        if result.dtype == torch.bool:
            return torch.ones_like(result)
        result = result.clone()
        result[:, 17] = 100.0
        return result

    return call


def test_every_native_option_has_its_class_and_a_value_here():
    assert set(NATIVE) == WITHOUT_CLASS | set(OPTIONS)
    assert set(ACTIVE) == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_class_is_what_stock_makes_for_the_option(option, monkeypatch):
    made = []
    monkeypatch.setattr(
        GenerationMixin, "_sample",
        lambda self, ids, logits_processor, stopping_criteria, **_: made.extend([*logits_processor, *stopping_criteria])
        or ids,
    )
    _generate(tiny_model(), _settings(option))
    assert OPTIONS[option] in map(type, made)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_patched_processor_or_criterion_runs(option, monkeypatch):
    """In lockstep, where stock's loop calls it; where there is no loop of stock's the option is refused."""
    kind, settings = OPTIONS[option], _settings(option)
    plain = {name: value for name, value in settings.items() if name != "tokenizer"}
    prompt = batch([20])["input_ids"][0].tolist()
    model, generator = tiny_model(), hf_paged.PagedGenerator(tiny_model(), tokenizer=byte_tokenizer())
    before = generator.generate([prompt], seed=0, **plain)
    patched = rf"{kind.__name__}.__call__ is patched"
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", _favouring(kind.__call__))
        expected = _generate(model, settings)
        hf_paged.enable(model, strict=True)
        assert_same_tensor(_generate(model, settings), expected)
        with pytest.raises(hf_paged.UnsupportedOptionError, match=patched):
            generator.generate([prompt], seed=0, **plain)
        with pytest.raises(hf_paged.UnsupportedOptionError, match=patched):
            generator.engine.add_request(prompt, GenerationConfig(**plain))
    assert generator.generate([prompt], seed=0, **plain)[0].token_ids == before[0].token_ids


@pytest.mark.parametrize("option", ["repetition_penalty", "top_k"])
@pytest.mark.parametrize("wrap", [
    torch.autocast("cpu", torch.bfloat16), lambda function: logits_process.TemperatureLogitsWarper.__call__,
], ids=["autocast", "another class'"])
def test_transformers_and_torchs_own_code_in_the_wrong_place(option, wrap, monkeypatch):
    kind = OPTIONS[option]
    monkeypatch.setattr(kind, "__call__", wrap(kind.__call__))
    model = hf_paged.enable(tiny_model())
    with pytest.raises(hf_paged.UnsupportedOptionError, match="is patched"):
        hf_paged.get_engine(model).add_request([1, 2, 3], GenerationConfig(**_settings(option)))


@pytest.mark.parametrize("kind", ALWAYS, ids=lambda kind: kind.__name__)
def test_lists_and_length(kind, monkeypatch):
    function = kind.__call__
    if kind is LogitsProcessorList:
        monkeypatch.setattr(kind, "__call__", lambda self, ids, scores, **kwargs: function(self, ids, -scores))
    else:
        monkeypatch.setattr(kind, "__call__", _favouring(function))
    model, settings = tiny_model(), {"max_new_tokens": 6}
    expected = _generate(model, settings)
    hf_paged.enable(model, strict=True)
    assert_same_tensor(_generate(model, settings), expected)
    with pytest.raises(hf_paged.UnsupportedOptionError, match=kind.__name__):
        hf_paged.get_engine(model).add_request([1, 2, 3], GenerationConfig(**settings))


def test_a_patched_option_that_is_not_asked_for_does_not_matter(monkeypatch):
    kind = logits_process.RepetitionPenaltyLogitsProcessor
    monkeypatch.setattr(kind, "__call__", _favouring(kind.__call__))
    assert_native_parity(hf_paged.enable(tiny_model(), strict=True), **batch([20, 7]), max_new_tokens=4)


def test_a_list_of_the_users_own_class():
    class Negated(LogitsProcessorList):
        def __call__(self, input_ids, scores, **kwargs):
            return -super().__call__(input_ids, scores, **kwargs)

    model, given = tiny_model(), Negated([logits_process.TemperatureLogitsWarper(1.0)])
    expected = model.generate(**batch([20]), max_new_tokens=4, logits_processor=given)
    hf_paged.enable(model, strict=True)
    assert_same_tensor(model.generate(**batch([20]), max_new_tokens=4, logits_processor=given), expected)


# -- modules ---------------------------------------------------------------------------------------------------------


def _rolled(output):
    if isinstance(output, torch.Tensor):
        return output.roll(1, -1)
    if isinstance(output, tuple):
        return (_rolled(output[0]), *output[1:])
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            setattr(output, name, getattr(output, name).roll(1, -1))
    return output


def _patches(function):
    """What changes results, what comes of transformers itself, and what torch wraps around it."""
    yield "changed", lambda *args, **kwargs: _rolled(function(*args, **kwargs))
    yield "another class'", CohereLayerNorm.forward
    yield "autocast", torch.autocast("cpu", torch.bfloat16)(function)


VARIANTS = (
    "qwen3", "qwen3-moe-mixed", "llama", "mistral", "qwen2", "gemma2", "gemma3", "phi3", "olmo2", "gpt-oss",
    "smollm3", "granite", "glm", "glm4", "mixtral", "olmo3", "ministral", "ministral3",
)


def _model(variant):
    return tiny_model() if variant == "qwen3" else family_model(variant)


@functools.cache
def _classes(variant):
    """The modeling file of a model, and its classes that stand in the model."""
    model = _model(variant)
    kinds = {type(module) for module in model.modules() if type(module).__module__ == type(model).__module__}
    return sys.modules[type(model).__module__], sorted(kinds, key=str)


def _methods(variant):
    """(class, name) of every function that a class which stands in the model defines or inherits for its call."""
    for kind in _classes(variant)[1]:
        yield kind, "__call__"
        for key, value in vars(kind).items():
            if isinstance(value, FunctionType) and key not in ("__init__", "extra_repr", "_init_weights"):
                yield kind, key


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_method_of_a_familys_classes(variant):
    """Each in turn, with each kind of patch; undone, the call is native again."""
    model = hf_paged.enable(_model(variant))
    engine = hf_paged.get_engine(model)
    assert engine.unsupported_reason() is None
    for kind, name in _methods(variant):
        for what, patch in _patches(getattr(kind, name)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(kind, name, patch)
                assert engine.unsupported_reason() is not None, (kind, name, what)
        assert engine.unsupported_reason() is None, (kind, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_function_of_a_familys_file_that_its_forwards_name(variant):
    model = hf_paged.enable(_model(variant))
    engine, names = hf_paged.get_engine(model), []
    mentioned = {
        name for kind, method in _methods(variant)
        for name in inspect.unwrap(getattr(kind, method)).__code__.co_names if method != "__call__"
    }
    for name, value in vars(_classes(variant)[0]).items():
        if name in mentioned and isinstance(function_inside(value) or value, FunctionType):
            names.append(name)
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(_classes(variant)[0], name, lambda *args, **kwargs: None)
                assert engine.unsupported_reason() is not None, name
    assert {"apply_rotary_pos_emb", "eager_attention_forward", "create_causal_mask"} <= set(names)
    assert engine.unsupported_reason() is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_that_a_family_reaches_is_at_home_and_watched(variant):
    originals = hf_paged.get_engine(hf_paged.enable(_model(variant)))._executor.original_code()
    assert [str(place) for place in originals.places if not is_original(place, place.value)] == []
    assert originals.patched() is None


CHANGING = {
    "another class' forward": (modeling_qwen3.Qwen3RMSNorm, CohereLayerNorm.forward, "Qwen3RMSNorm.forward is patched"),
    "autocast": (
        modeling_qwen3.Qwen3MLP, torch.autocast("cpu", torch.bfloat16)(modeling_qwen3.Qwen3MLP.forward),
        "Qwen3MLP.forward is patched",
    ),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("variant", ["qwen3"])
def test_stocks_result_comes_out(name, variant, monkeypatch):
    model, inputs = hf_paged.enable(_model(variant)), batch([40, 7])
    plain = assert_native_parity(model, **inputs, max_new_tokens=6)
    kind, function, reason = CHANGING[name]
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", function)
        expected = stock_generate(model, **inputs, max_new_tokens=6)
        assert name == "autocast" or not torch.equal(expected, plain)
        with pytest.warns(hf_paged.FallbackWarning, match=reason):
            assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)
    assert_native_parity(model, plain, **inputs, max_new_tokens=6)


@pytest.mark.parametrize("variant", ["qwen3", "mistral"])
def test_attention_of_torch_replaced(variant, monkeypatch):
    """As SageAttention documents it; a model that does not attend by this function is left alone."""
    stock = F.scaled_dot_product_attention
    model, inputs = _model(variant), batch([40, 7])
    model.set_attn_implementation("sdpa")
    hf_paged.enable(model)
    assert_native_parity(model, **inputs, max_new_tokens=4)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: stock(*args, **kwargs).roll(1, -1))
    expected = stock_generate(model, **inputs, max_new_tokens=4)
    with pytest.warns(hf_paged.FallbackWarning, match="scaled_dot_product_attention is patched"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=4), expected)
    model.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_paged.FallbackWarning)
        assert_native_parity(model, **inputs, max_new_tokens=4)


@pytest.mark.parametrize(("module", "name"), [
    (F, "linear"), (F, "embedding"), (F, "silu"), (torch, "multinomial"), (torch, "rsqrt"),
])
def test_functions_of_torch_that_forwards_call(module, name, monkeypatch):
    model, stock = hf_paged.enable(tiny_model()), getattr(module, name)
    engine = hf_paged.get_engine(model)
    assert engine.unsupported_reason() is None
    monkeypatch.setattr(module, name, lambda *args, **kwargs: stock(*args, **kwargs))
    assert name in engine.unsupported_reason()


def test_keys_and_values_of_a_patched_layer_that_is_called_as_it_stands(monkeypatch):
    """A LoRA layer's code is part of what is cached: neither is served with the other's keys and values."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model, inputs = peft.get_peft_model(tiny_model(), config).eval(), batch([40, 40])
    causal_lm = model.get_base_model()
    hf_paged.enable(model, strict=True)
    plain = assert_native_parity(causal_lm, **inputs, max_new_tokens=6)
    layer = peft.tuners.lora.Linear
    stock = layer.forward
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs).roll(1, -1))
            assert not torch.equal(assert_native_parity(causal_lm, **inputs, max_new_tokens=6), plain)
        assert_native_parity(causal_lm, plain, **inputs, max_new_tokens=6)


@pytest.fixture(scope="module")
def enabled():
    """By variant: an enabled model, and its engine, which runs it natively."""
    models = {}

    def of(variant):
        if variant not in models:
            models[variant] = hf_paged.enable(_model(variant))
        engine = hf_paged.get_engine(models[variant])
        assert engine.unsupported_reason() is None
        return models[variant], engine

    return of


def _code_of(variant):
    """Every function of a family's file that a call may run: its classes' methods, and what they call there."""
    functions = [inspect.unwrap(getattr(kind, name)) for kind, name in _methods(variant) if name != "__call__"]
    mentioned = {name for function in functions for name in _loaded(function, "GLOBAL")}
    return functions + [vars(_classes(variant)[0])[name] for name in sorted(mentioned)
                        if isinstance(vars(_classes(variant)[0]).get(name), FunctionType)
                        and vars(_classes(variant)[0])[name].__module__ == _classes(variant)[0].__name__]


def _loaded(function, *kinds):
    """Names that a function's own instructions load: globals, or attributes."""
    return {i.argval for i in dis.get_instructions(function) if i.opname in {f"LOAD_{kind}" for kind in kinds}}


@pytest.mark.parametrize("name", ["create_causal_mask", "find_packed_sequence_indices", "causal_mask_function"])
def test_functions_of_other_modules(name, monkeypatch):
    model = hf_paged.enable(tiny_model())
    monkeypatch.setattr(masking_utils, name, _own)
    assert hf_paged.get_engine(model).unsupported_reason() == f"transformers.masking_utils.{name} is patched"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_method_of_tensors_that_a_familys_code_calls(variant, enabled):
    _, engine = enabled(variant)
    loaded = {name for function in _code_of(variant) for name in _loaded(function, "ATTR", "METHOD")}
    names = {name for name in loaded if callable(getattr(torch.Tensor, name, None))}
    assert {"transpose", "to", "float"} <= names
    for name in names:
        stock = getattr(torch.Tensor, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, name, lambda *args, stock=stock, **kwargs: stock(*args, **kwargs))
            reason = engine.unsupported_reason()
        assert f"Tensor.{name} is patched" in str(reason)
    assert engine.unsupported_reason() is None


@pytest.mark.parametrize("kind", [DynamicCache, DynamicLayer, DynamicSlidingWindowLayer])
def test_what_stock_keeps_keys_and_values_in(kind, monkeypatch):
    model, stock = hf_paged.enable(tiny_model()), kind.update
    monkeypatch.setattr(kind, "update", lambda *args, **kwargs: stock(*args, **kwargs), raising=False)
    assert hf_paged.get_engine(model).unsupported_reason() == f"{kind.__name__}.update is patched"


def test_a_helper_of_a_subclass_of_the_model():
    class Mine(type(tiny_model())):
        def _valid_auto_compile_criteria(self, *args, **kwargs):
            return super()._valid_auto_compile_criteria(*args, **kwargs)

    model = tiny_model()
    model.__class__ = Mine
    reason = "Mine._valid_auto_compile_criteria is not transformers' own"
    assert_falls_back(model, reason, **batch([20, 7]), max_new_tokens=3)


@pytest.mark.parametrize("name", ["forward", "get_base_layer"])
def test_a_lora_layers_code_has_a_version_of_its_own(name, monkeypatch):
    peft = pytest.importorskip("peft")
    originals = of_class(peft.tuners.lora.Linear)
    before = originals.version()
    with monkeypatch.context() as patch:
        patch.setattr(peft.tuners.lora.Linear, name, _own)
        assert originals.version() == originals.version() != before
    assert originals.version() == before


# -- modes of torch ----------------------------------------------------------------------------------------------------


class Halving(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        return result * 0.5 if function is F.embedding else result


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Halving, Counting])
def test_a_mode_of_the_users(mode):
    """The call under it is stock's, and leaves nothing behind for the calls after it."""
    def call(model, **kwargs):
        with mode():
            return model.generate(**kwargs)

    model, inputs = tiny_model(), batch([40, 40])
    plain = model.generate(**inputs, max_new_tokens=4)
    assert_falls_back(model, f"a {mode.__name__} is active", call=call, **inputs, max_new_tokens=4)
    assert_native_parity(hf_paged.enable(model, strict=True), plain, **inputs, max_new_tokens=4)
    with mode(), pytest.raises(hf_paged.UnsupportedModelError, match=mode.__name__):
        hf_paged.get_engine(model).add_request([1, 2, 3], GenerationConfig(max_new_tokens=2))


def test_a_default_device_is_no_mode_of_the_users():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    with torch.device("meta"):
        assert engine.unsupported_reason() is None
    torch.set_default_device("meta")
    try:
        assert engine.unsupported_reason() is None
    finally:
        torch.set_default_device(None)


# -- what was there before hf_paged ------------------------------------------------------------------------------------


def _own(self, hidden_states):
    return hidden_states


def test_a_patch_that_was_there_first_is_no_original(monkeypatch):
    norm = modeling_qwen3.Qwen3RMSNorm
    place, stock = PatchPoint(norm, "forward"), norm.forward
    for value in (_own, CohereLayerNorm.forward, torch.autocast("cpu")(stock), torch.no_grad()(_own)):
        assert not is_original(place, value)
        with monkeypatch.context() as patch:
            patch.setattr(norm, "forward", value)
            originals = OriginalCode([(norm, "forward")])
            assert originals.patched() == "Qwen3RMSNorm.forward"
        assert originals.patched() is None  # undone
    assert is_original(place, stock) and is_original(place, torch.no_grad()(stock))


@pytest.mark.parametrize("variant", VARIANTS)
def test_undone_a_patch_that_was_there_first_leaves_nothing_unwatched(variant):
    """What the code behind it reaches was out of sight."""
    for kind in {kind for kind, _ in _methods(variant)}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "forward", _own)
            originals = OriginalCode([(kind, "forward")])
            patched = originals.version()
        assert originals.version() != patched and originals.patched() is None
        watched = {(id(place.holder), place.name) for place in originals.places}
        assert {(id(place.holder), place.name) for place in OriginalCode([(kind, "forward")]).places} <= watched


def test_a_patch_after_one_that_was_there_first_was_undone(monkeypatch):
    stock = modeling_qwen3.Qwen3Attention.forward
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3.Qwen3Attention, "forward", _own)
        originals = OriginalCode([(modeling_qwen3.Qwen3Attention, "forward")])
    with monkeypatch.context() as patch:  # also one that is there while all is looked at again
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", _own)
        assert originals.patched() == "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb"
    assert originals.patched() is None
    with monkeypatch.context() as patch:  # what is known stays known, whatever is there when all is looked at again
        patch.setattr(modeling_qwen3.Qwen3Attention, "forward", _own)
        originals = OriginalCode([(modeling_qwen3.Qwen3Attention, "forward"), (modeling_qwen3.Qwen3MLP, "forward")])
        patch.setattr(modeling_qwen3.Qwen3MLP, "forward", _own)
        patch.setattr(modeling_qwen3.Qwen3Attention, "forward", stock)
        assert originals.patched() == "Qwen3MLP.forward"
    assert originals.patched() is None
    monkeypatch.setattr(modeling_qwen3, "rotate_half", _own)
    assert originals.patched() == "transformers.models.qwen3.modeling_qwen3.rotate_half"


def _other_callables(function):
    """What behaves as the function, and is none."""
    yield functools.partial(function)
    yield functools.partialmethod(function)
    yield nn.Identity()
    yield functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_other_callable_is_at_home_where_a_function_belongs(variant):
    names = {name for function in _code_of(variant) for name in _loaded(function, "GLOBAL")}
    functions = [PatchPoint(_classes(variant)[0], n) for n in names
                 if isinstance(vars(_classes(variant)[0]).get(n), FunctionType)]
    methods = [PatchPoint(kind, name) for kind, name in _methods(variant)]
    for place in (*functions, *methods):
        for value in _other_callables(getattr(place.holder, place.name)):
            assert not is_original(place, value), (place, value)


@pytest.mark.parametrize(("name", "value"), [
    ("torch", types.ModuleType("torch")), ("create_causal_mask", masking_utils.create_sliding_window_causal_mask),
    ("create_causal_mask", tiny_model), ("DynamicCache", type("DynamicCache", (DynamicCache,), {})),
    ("apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb), ("Qwen3RMSNorm", modeling_llama.LlamaRMSNorm),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_module_imports_is_what_the_other_has(name, value):
    place = PatchPoint(modeling_qwen3, name)
    assert is_original(place, place.value) and not is_original(place, value)


def test_code_exchanged_inside_a_function(monkeypatch):
    model = hf_paged.enable(tiny_model())
    monkeypatch.setattr(modeling_qwen3.rotate_half, "__code__", (lambda x: x).__code__)
    assert hf_paged.get_engine(model).unsupported_reason() == "rotate_half.__code__ is patched"



@pytest.mark.parametrize(("holder", "name"), [
    (torch.nn.functional, "linear"), (torch.nn.functional, "scaled_dot_product_attention"), (torch, "rsqrt"),
    (torch, "cat"), (torch.Tensor, "matmul"),
])
def test_a_wrapper_of_a_function_in_c_that_names_itself_like_that(holder, name):
    """By `functools.wraps`, as programs count calls, before hf_paged is imported."""
    function = getattr(holder, name)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    assert is_original(PatchPoint(holder, name), function)
    assert not is_original(PatchPoint(holder, name), wrapper)


@pytest.mark.parametrize(("holder", "name"), [(torch.linalg, "solve_triangular"), (torch.nn.functional, "logsigmoid")])
def test_a_function_of_c_under_another_name_of_its_own_is_original(holder, name):
    place = PatchPoint(holder, name)
    assert is_original(place, place.value) and not is_original(place, torch.linalg.inv)
    assert not is_original(place, torch.relu)


def test_what_torch_imports_under_a_private_name_is_original():
    assert is_original(PatchPoint(torch.nn.functional, "_sym_int"), torch.nn.functional._sym_int)
    assert not is_original(PatchPoint(torch.nn.functional, "_sym_int"), torch.nn.functional.relu)
