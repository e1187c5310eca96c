"""`enable` and `disable`: the object stays the caller's, and nothing but `generate` changes."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support import (
    assert_falls_back,
    assert_native_parity,
    assert_native_tokens,
    assert_same_tensor,
    batch,
    stock_copy,
    stock_generate,
    tiny_config,
    tiny_model,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    Qwen3ForCausalLM,
    Qwen3Model,
    StoppingCriteria,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from hf_paged import FallbackWarning, UnsupportedModelError
from hf_paged.integration import hooks
from hf_paged.integration.enabled import ENGINES
from hf_paged.runner import request_state


@pytest.fixture
def no_other_enabled_model(monkeypatch):
    """Models of other test modules, which may be enabled for all of the session, keep transformers' methods hooked."""
    gc.collect()
    enabled = dict(ENGINES)
    ENGINES.clear()
    hooks.put_back_if_unused()
    yield
    ENGINES.update(enabled)
    if enabled:
        hooks.place()


def logits(model, seed=1):
    inputs = batch([20, 7], seed=seed)
    with torch.no_grad():
        return model(**inputs).logits


# -- the object ------------------------------------------


def test_enable_returns_the_very_object_and_disable_restores_it():
    model = tiny_model()
    attributes, before, forward = set(vars(model)), logits(model), type(model).forward
    assert hf_paged.enable(model) is model
    assert hf_paged.is_enabled(model)
    assert set(vars(model)) == attributes
    assert isinstance(model, Qwen3ForCausalLM)
    assert type(model) is Qwen3ForCausalLM
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
    tensors = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    modules = {n: (m, type(m), set(vars(m))) for n, m in model.named_modules()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    hf_paged.enable(model, strict=True).generate(**batch([20, 7]), max_new_tokens=5)
    hf_paged.disable(model)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    for name, (tensor, content) in tensors.items():
        assert after[name] is tensor
        assert torch.equal(tensor, content)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # nothing is left of merged memory
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


BOUND_BEFORE = """
import hf_paged
from support import batch, tiny_model

model, inputs = tiny_model(), batch([5])
before = model.generate
engine = hf_paged.get_engine(hf_paged.enable(model))
before(**inputs, max_new_tokens=2)
assert not engine.stats().calls["native"].num_calls
model.generate(**inputs, max_new_tokens=2)
assert engine.stats().calls["native"].num_calls == 1
"""


@pytest.mark.slow
def test_a_bound_generate_taken_before_any_model_was_enabled_runs_in_stock():
    """As the docstring of `enable` says: no hook is looked up by what an object holds already."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tests.parent), str(tests)))}
    subprocess.run([sys.executable, "-c", BOUND_BEFORE], env=environment, check=True, timeout=300)


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


def test_two_models_have_two_engines():
    first, second = hf_paged.enable(tiny_model(0), strict=True), hf_paged.enable(tiny_model(1), strict=True)
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
])
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
])
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
    with pytest.raises(ValueError, match=r"hf_paged\.enable"):
        hf_paged.get_engine(tiny_model())


# -- subclasses ------------------------------------------


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
    assert type(model) is Renamed
    assert model.greet() == "hello"
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=8)
    hf_paged.disable(model)
    assert type(model) is Renamed


def test_a_class_that_another_program_derives_after_enable_stays():
    """As FSDP2's `fully_shard` and pyvene do."""
    model, inputs = hf_paged.enable(tiny_model(), strict=True), batch([20, 7])
    expected = assert_native_parity(model, **inputs, max_new_tokens=5)
    model.__class__ = derived = type("DerivedQwen3ForCausalLM", (Qwen3ForCausalLM,), {})
    assert_native_tokens(model, expected, inputs, max_new_tokens=5)
    hf_paged.disable(model)
    assert type(model) is derived and not hf_paged.is_enabled(model)


# -- the class ------------------------------------------

SHORT = batch([20, 7])


def _lockstep(model):
    model.generate(**SHORT, max_new_tokens=3, output_scores=True, return_dict_in_generate=True)


ENTRIES = {
    "enable": lambda model: None,
    "generate": lambda model: model.generate(**SHORT, max_new_tokens=3),
    "lockstep": _lockstep,
    "beams": lambda model: model.generate(**SHORT, max_new_tokens=3, num_beams=2),
    "prompt lookup": lambda model: model.generate(**batch([9]), max_new_tokens=3, prompt_lookup_num_tokens=2),
    "explain": lambda model: hf_paged.explain(model, max_new_tokens=3),
    "PagedGenerator": lambda model: hf_paged.PagedGenerator(hf_paged.disable(model)).generate(
        [[5, 6]], max_new_tokens=3),
    "generate_batch": lambda model: model.generate_batch([[5, 6]], GenerationConfig(max_new_tokens=3)),
    "weight_update": lambda model: hf_paged.weight_update(model).__enter__() and None,
}


@pytest.fixture
def installed():
    hf_paged.install()
    yield
    hf_paged.uninstall()


def assert_class_is_stocks(model, cls=Qwen3ForCausalLM):
    assert type(model) is cls and model.__class__ is cls
    assert {cls: "found"}[type(model)] == "found"
    assert pickle.loads(pickle.dumps(type(model))) is cls
    made = type(model)(tiny_config())
    assert type(made) is cls and not hf_paged.is_enabled(made)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_enabled_model_keeps_its_class(entry):
    model = hf_paged.enable(tiny_model())
    before = dict(vars(Qwen3ForCausalLM))
    ENTRIES[entry](model)
    assert_class_is_stocks(model)
    assert dict(vars(Qwen3ForCausalLM)) == before
    hf_paged.disable(model)
    assert_class_is_stocks(model)


@pytest.mark.parametrize("entry", sorted(ENTRIES.keys() - {"enable", "weight_update"}))
def test_a_model_that_install_enables_keeps_its_class(entry, installed):
    model = tiny_model()
    ENTRIES[entry](model)
    assert_class_is_stocks(model)


def test_the_class_is_stocks_also_during_a_call():
    """For processors, criteria and streamers, and for other threads, which run at the same time."""
    model, seen = hf_paged.enable(tiny_model()), []

    def look(*_):
        seen.append((type(model), dict(vars(Qwen3ForCausalLM)) == before))
        return False

    before = dict(vars(Qwen3ForCausalLM))
    criterion = type("Looking", (StoppingCriteria,), {"__call__": lambda self, ids, scores: torch.full(
        (len(ids),), look())})()
    model.generate(**SHORT, max_new_tokens=3, stopping_criteria=[criterion])
    assert seen == [(Qwen3ForCausalLM, True)] * 3


def test_another_programs_loop_gets_the_model_itself():
    model, seen = hf_paged.enable(tiny_model()), []

    def loop(model, input_ids, **kwargs):
        seen.append(model)
        return input_ids

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        model.generate(**SHORT, custom_generate=loop)
    assert [found is model for found in seen] == [True]


def test_a_processor_that_holds_the_model_copies_and_pickles_a_stock_model():
    """Stock's processor of `guidance_scale` is made with the `self` of `generate`."""
    model, made = hf_paged.enable(tiny_model()), []
    stocks = UnbatchedClassifierFreeGuidanceLogitsProcessor.__call__

    def call(processor, ids, scores):
        if not made:
            made.extend([copy.deepcopy(processor.model), pickle.loads(pickle.dumps(processor.model))])
        return stocks(processor, ids, scores)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", FallbackWarning)
        patch.setattr(UnbatchedClassifierFreeGuidanceLogitsProcessor, "__call__", call)
        model.generate(**batch([9]), max_new_tokens=2, guidance_scale=1.5)
    assert [type(copied) for copied in made] == [Qwen3ForCausalLM] * 2
    assert all(torch.equal(logits(copied), logits(model)) for copied in made)


def _mixin():
    return {name: value for name, value in vars(GenerationMixin).items() if not name.startswith("__")}


def test_only_the_hooked_methods_of_the_mixin_are_replaced_and_the_last_disable_puts_them_back(no_other_enabled_model):
    before = _mixin()
    first, second = hf_paged.enable(tiny_model(0)), hf_paged.enable(tiny_model(1))
    changed = {name for name, value in _mixin().items() if before.get(name) is not value}
    assert changed == set(hooks._HOOKS)
    for name in changed:
        assert inspect.signature(getattr(first, name)) == inspect.signature(before.get(
            name, getattr(ContinuousMixin, name, None)).__get__(first))
    hf_paged.disable(first)
    assert _mixin()["generate"] is not before["generate"]
    hf_paged.disable(second)
    assert _mixin() == before
    hf_paged.explain(second, max_new_tokens=3)
    assert _mixin() == before


def test_a_method_that_another_program_wraps_after_enable_is_kept_until_that_is_undone(no_other_enabled_model):
    before, calls = _mixin(), []
    model = hf_paged.enable(tiny_model(), strict=True)
    expected = assert_native_parity(model, **SHORT, max_new_tokens=5)
    hooked = GenerationMixin.generate

    @functools.wraps(hooked)
    def wrapper(self, *args, **kwargs):
        calls.append(type(self))
        return hooked(self, *args, **kwargs)

    GenerationMixin.generate = wrapper
    try:
        assert_native_tokens(model, expected, SHORT, max_new_tokens=5)
        hf_paged.disable(model)
        assert GenerationMixin.generate is wrapper
        assert_same_tensor(model.generate(**SHORT, max_new_tokens=5), expected)
        assert_native_tokens(hf_paged.enable(model, strict=True), expected, SHORT, max_new_tokens=5)
        assert GenerationMixin.generate is wrapper  # the hook inside is not placed twice
        assert calls == [Qwen3ForCausalLM] * 3
    finally:
        GenerationMixin.generate = hooked
    hf_paged.disable(model)
    assert _mixin() == before


class OwnGenerate(Qwen3ForCausalLM):
    """Has a `generate` and a decoding method of its own, which call those that it inherits."""

    def generate(self, *args, extra=0, **kwargs):
        return super().generate(*args, **kwargs) + extra

    def _sample(self, *args, **kwargs):
        self.sampled = type(self)
        return super()._sample(*args, **kwargs)


def test_a_subclass_with_its_own_generate_and_decoding_method_runs_as_in_stock():
    model = _of_class(OwnGenerate)
    expected = model.generate(**SHORT, max_new_tokens=5, extra=3)
    del model.sampled
    hf_paged.enable(model)
    with pytest.warns(FallbackWarning, match=r"OwnGenerate\._sample is not transformers' own"):
        actual = model.generate(**SHORT, max_new_tokens=5, extra=3)
    assert_same_tensor(actual, expected)
    assert model.sampled is OwnGenerate
    assert_class_is_stocks(model, OwnGenerate)


@pytest.mark.parametrize(("name", "options"), [
    ("_sample", {}), ("_sample", {"output_scores": True, "return_dict_in_generate": True}),
    ("_beam_search", {"num_beams": 2}), ("_assisted_decoding", {"prompt_lookup_num_tokens": 2}),
], ids=["native", "lockstep", "beams", "lookup"])
@pytest.mark.parametrize("of_class", [False, True], ids=["of the mixin", "of the class"])
@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_decoding_methods_that_call_the_ids_otherwise(monkeypatch, name, options, of_class):
    """Stock passes them by position."""
    own, model = getattr(GenerationMixin, name), tiny_model()

    def patched(self, tokens, *args, **kwargs):
        return own(self, tokens, *args, **kwargs)

    if of_class:
        model = _of_class(type("Own", (Qwen3ForCausalLM,), {name: patched}))
    else:
        monkeypatch.setattr(GenerationMixin, name, patched)
    call = {**batch([12]), "max_new_tokens": 5, "do_sample": False, **options}
    expected = stock_generate(model, **call)
    actual = hf_paged.enable(model).generate(**call)
    assert_same_tensor(*(getattr(made, "sequences", made) for made in (actual, expected)))


class Registered(type):
    """A metaclass that takes each name once."""

    names: ClassVar[set[str]] = set()

    def __init__(cls, name, bases, namespace, **options):
        super().__init__(name, bases, namespace)
        assert name not in Registered.names
        Registered.names.add(name)


class Tagged(Qwen3ForCausalLM):
    def __init_subclass__(cls, *, tag, **options):
        super().__init_subclass__(**options)


class OfTag(Tagged, tag="a"):
    """Whose base wants to know something of every class that derives from it."""


class OfMetaclass(Qwen3ForCausalLM, metaclass=Registered):
    """Whose metaclass does."""


class WithFinalizer(Qwen3ForCausalLM):
    """Closes a file when it is gone."""

    def __init__(self, config):
        super().__init__(config)
        self.file = io.StringIO()

    def __del__(self):
        self.file.close()


@pytest.mark.parametrize("cls", [OfTag, OfMetaclass, WithFinalizer])
def test_the_users_class_hears_nothing_of_a_call(cls):
    model = hf_paged.enable(_of_class(cls), strict=True)
    expected = assert_native_parity(model, **SHORT, max_new_tokens=3)
    scores = model.generate(**SHORT, max_new_tokens=3, output_scores=True, return_dict_in_generate=True)
    assert_same_tensor(scores.sequences, expected)
    gc.collect()
    assert cls is not WithFinalizer or not model.file.closed


class OwnPreparation(Qwen3ForCausalLM):
    """Keeps something for each of its objects outside of them."""

    KEPT: ClassVar = weakref.WeakKeyDictionary()

    def __init__(self, config):
        super().__init__(config)
        self.KEPT[self] = 5

    def _get_logits_processor(self, *args, **kwargs):
        assert self.KEPT[self] == 5 and type(self) is OwnPreparation and hf_paged.is_enabled(self) is self.expected
        return super()._get_logits_processor(*args, **kwargs)


def test_methods_of_a_subclass_are_called_on_the_model_itself():
    model = _of_class(OwnPreparation)
    model.expected = False
    expected = model.generate(**SHORT, max_new_tokens=3)
    model.expected = True
    hf_paged.enable(model)
    with pytest.warns(FallbackWarning, match=r"OwnPreparation\._get_logits_processor is not transformers' own"):
        assert_same_tensor(model.generate(**SHORT, max_new_tokens=3), expected)


def test_a_method_that_another_program_put_back_is_hooked_again():
    model = tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", inspect.unwrap(GenerationMixin.generate))
        hf_paged.enable(model, strict=True)
    hf_paged.enable(model)
    assert_native_parity(model, **SHORT, max_new_tokens=3)


def test_a_method_that_another_program_replaced_before_enable_is_called(no_other_enabled_model, monkeypatch):
    """Also where it does not say what it stands for."""
    stock = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **SHORT, max_new_tokens=3)
    hf_paged.disable(model)


def test_the_hooks_go_with_the_last_enabled_model(no_other_enabled_model):
    before = _mixin()
    model = hf_paged.enable(tiny_model())
    hf_paged.enable(hf_paged.disable(model))
    model.generate(**SHORT, max_new_tokens=2)
    del model
    gc.collect()
    assert _mixin() == before


def test_a_patch_of_what_the_mixin_inherits_reaches_models_that_are_not_enabled(monkeypatch):
    enabled = hf_paged.enable(tiny_model())
    monkeypatch.setattr(ContinuousMixin, "init_continuous_batching", lambda self, *args, **kwargs: "patched")
    assert hf_paged.is_enabled(enabled)
    assert tiny_model(1).init_continuous_batching() == "patched"


def test_an_enabled_draft_model_is_a_part_of_the_call_that_it_drafts_for():
    model, draft = hf_paged.enable(tiny_model()), hf_paged.enable(tiny_model(1), strict=True)
    expected = stock_generate(model, **batch([7]), max_new_tokens=6, assistant_model=stock_copy(draft))
    with pytest.warns(FallbackWarning, match="assisted") as caught:
        actual = model.generate(**batch([7]), max_new_tokens=6, assistant_model=draft)
    assert_same_tensor(actual, expected)
    assert len([one for one in caught if one.category is FallbackWarning]) == 1
    assert not hf_paged.get_engine(draft).stats().calls["stock"].num_calls


@pytest.mark.parametrize("by_place", [False, True])
def test_a_loop_of_another_program_is_announced_however_it_is_given(by_place):
    model, seen = hf_paged.enable(tiny_model()), []

    def loop(model, input_ids, **kwargs):
        seen.append(model)
        return input_ids

    assert [*inspect.signature(inspect.unwrap(GenerationMixin.generate)).parameters].index(
        "custom_generate") == hooks._CUSTOM + 1
    args, kwargs = ([None] * 9 + [loop], {}) if by_place else ([], {"custom_generate": loop})
    with pytest.warns(FallbackWarning, match="custom_generate"):
        model.generate(SHORT["input_ids"], *args, **kwargs)
    assert [found is model for found in seen] == [True]


def test_other_models_of_the_class_pay_a_look_up_alone():
    """A call of a model that is not enabled runs nothing of hf_paged's but the hook."""
    enabled, other, ran = hf_paged.enable(tiny_model()), tiny_model(1), set()

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("hf_paged.integration"):
            ran.add((module, frame.f_code.co_name))

    gc.collect()  # models of earlier tests, whose end takes hooks back
    sys.setprofile(note)
    try:
        other.generate(**batch([5]), max_new_tokens=2)
        other(**batch([5]))
    finally:
        sys.setprofile(None)
    assert hf_paged.is_enabled(enabled)
    assert {name for _, name in ran} == {"generate_", "_of_call", "model_of", "engine_of", "asked"}


# -- copies and checkpoints ------------------------------------------


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


# -- dtypes ------------------------------------------


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


# -- training ------------------------------------------


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


@pytest.mark.each_value
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


LONG = 2100


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(("lengths", "settings"), [([300] * 5, {}), ([LONG], {"num_blocks": 200}), ([LONG, LONG], {})],
                         ids=["pool", "token history", "both"])
def test_what_grows_in_inference_mode_is_used_and_trained_with_outside(lengths, settings, used_before, monkeypatch):
    """No tensor made under inference mode may be written, or needed by autograd, later."""
    monkeypatch.setattr(request_state, "_HISTORY_BYTES", 257 * 2048 * 4)
    model = hf_paged.enable(tiny_model(max_position_embeddings=4096), strict=True, **settings)
    loop, inputs = hf_paged.get_engine(model)._core, batch([20, 7])
    if used_before:
        assert_native_parity(model, **inputs, max_new_tokens=4)
    with torch.inference_mode():
        model.generate(**batch(lengths), max_new_tokens=4)
    assert (loop.pool.num_growths > 0) == (not settings)
    assert (loop.pool.runner.state.tokens.shape[1] > 2048) == (LONG in lengths)
    assert_native_parity(model, **inputs, max_new_tokens=6)
    model.train()
    _train(model, steps=1)
    assert_native_parity(model.eval(), **inputs, max_new_tokens=6)


# -- wrappers ------------------------------------------


def test_a_compiled_model():
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    compiled = torch.compile(model, backend="eager")
    assert hf_paged.enable(compiled, strict=True) is compiled
    assert hf_paged.is_enabled(model)
    assert_native_tokens(compiled, expected, inputs, max_new_tokens=6)
    assert_native_tokens(model, expected, inputs, max_new_tokens=6)
    assert torch.allclose(logits(compiled), logits(model), atol=1e-5)
    hf_paged.disable(compiled)
    assert type(model) is Qwen3ForCausalLM


def test_a_model_compiled_in_place():
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    model.compile(backend="eager")
    hf_paged.enable(model, strict=True)
    assert_native_tokens(model, expected, inputs, max_new_tokens=6)


def _compiled(model):
    return torch.compile(model, backend="eager")


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("change", [_compiled, _compiled_in_place, nn.parallel.DistributedDataParallel])
def test_a_model_wrapped_after_it_was_used(change, process_group):
    model = hf_paged.enable(tiny_model(), strict=True)
    engine, inputs = hf_paged.get_engine(model), batch([40, 7])
    expected = assert_native_parity(model, **inputs, max_new_tokens=6)
    wrapped = change(model)
    assert hf_paged.get_engine(wrapped) is engine
    caller = getattr(wrapped, "module", wrapped)
    assert_native_tokens(caller, expected, inputs, max_new_tokens=6)
    ids = inputs["input_ids"]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    trained = stock_copy(model).generate(**inputs, max_new_tokens=6)
    assert not torch.equal(trained, expected)
    assert_native_tokens(caller, trained, inputs, max_new_tokens=6)
    hf_paged.disable(wrapped)
    assert type(model) is Qwen3ForCausalLM


def test_a_model_in_ddp(process_group):
    model = tiny_model()
    inputs = batch([20, 7])
    expected = model.generate(**inputs, max_new_tokens=6)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert hf_paged.enable(wrapped, strict=True) is wrapped
    assert hf_paged.is_enabled(model)
    assert_native_tokens(wrapped.module, expected, inputs, max_new_tokens=6)
    ids = inputs["input_ids"]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    hf_paged.disable(wrapped)
    assert type(model) is Qwen3ForCausalLM


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
    sharded = type(model)
    assert_native_tokens(model, expected, inputs, max_new_tokens=6)
    hf_paged.disable(model)
    assert type(model) is sharded and not hf_paged.is_enabled(model)


def test_stock_generate_of_the_oracle_does_not_use_the_engine():
    """The oracle of every test here is a deep copy: it must never run on the engine it is compared with."""
    model = hf_paged.enable(tiny_model())
    stock_generate(model, **batch([20, 7]), max_new_tokens=6)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 0


# -- settings that the model refuses ------------------------------------------


@pytest.mark.parametrize(("setting", "message"), [
    ({"attention_backend": "triton"}, "attention_backend='triton'.*CPU"),
])
def test_settings_that_this_model_cannot_run_with(setting, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model()
    for call in (hf_paged.enable, hf_paged.PagedGenerator):
        with pytest.raises(ValueError, match=message):
            call(model, **setting)
        assert type(model) is Qwen3ForCausalLM
        assert not hf_paged.is_enabled(model)
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    with pytest.raises(ValueError, match=message):
        hf_paged.enable(model, **setting)
    assert hf_paged.is_enabled(model)
    assert hf_paged.get_engine(model) is engine
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_models_of_every_dtype(dtype):
    model = hf_paged.enable(tiny_model().to(getattr(torch, dtype)), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)


# -- models that are taken apart while enabled ------------------------------------------


class ForeignEmbedding(nn.Module):
    """An embedding without `.weight`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


def _foreign_embedding(model):
    model.model.embed_tokens = ForeignEmbedding(model.model.embed_tokens)


def _no_layers(model):
    model.model.layers = nn.ModuleList()


def _head_gone(model):
    model.lm_head = nn.Identity()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("change", [_foreign_embedding, _no_layers, _head_gone])
def test_a_model_taken_apart_while_enabled_still_works_as_stock_and_can_be_disabled(change, used):
    model, inputs = hf_paged.enable(tiny_model()), batch([20, 7])
    weights = [p.detach().clone() for p in model.model.layers.parameters()]
    layers = model.model.layers
    if used:
        model.generate(**inputs, max_new_tokens=3)
    change(model)
    expected = stock_generate(model, **inputs, max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert_same_tensor(model.generate(**inputs, max_new_tokens=3), expected)
    hf_paged.disable(model)
    assert type(model) is Qwen3ForCausalLM
    assert not hf_paged.is_enabled(model)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=3), expected)
    assert all(torch.equal(p, w) for p, w in zip(layers.parameters(), weights, strict=True))


def test_disable_ends_even_where_the_engine_fails(monkeypatch):
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([20, 7]), max_new_tokens=3)

    def broken(self):
        raise RuntimeError("no device")

    monkeypatch.setattr(hf_paged.engine.engine.Engine, "shutdown", broken)
    with pytest.raises(RuntimeError, match="no device"):
        hf_paged.disable(model)
    assert type(model) is Qwen3ForCausalLM
    assert not hf_paged.is_enabled(model)


# -- memory ------------------------------------------


@pytest.fixture
def no_cycle_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_deleting_the_model_frees_the_pool_without_a_cycle_collection(no_cycle_collector):
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    model.generate(**batch([20, 7]), max_new_tokens=5)
    list(engine.step())
    gone = [weakref.ref(x) for x in (model, engine, engine._core.pool.runner, engine._core.pool.runner.cache)]
    del model, engine
    assert [ref() for ref in gone] == [None] * 4


def test_disabling_frees_the_pool_without_a_cycle_collection(no_cycle_collector):
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([20, 7]), max_new_tokens=5)
    gone = weakref.ref(hf_paged.get_engine(model)._core.pool.runner.cache)
    hf_paged.disable(model)
    assert gone() is None
