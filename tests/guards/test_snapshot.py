"""A look at a model that did not change is quick, and one that did is noticed, whatever the change."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import transformers
from family_models import family_model
from image_models import image_model
from packaging.version import Version
from support import batch, tiny_model
from torch import nn

import hf_paged
from hf_paged.guards.snapshot import ModelSnapshot
from hf_paged.models import eligibility
from hf_paged.options.request_spec import RequestSpec
from hf_paged.parallel.layers import Shard


def _attribute(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def _hook(path, register="register_forward_hook"):
    return lambda model: getattr(model.get_submodule(path), register)(lambda *args: None)


def _data(path, change):
    def apply(model):
        parameter = model.get_parameter(path)
        parameter.data = change(parameter.data)

    return apply


class Wrapper(nn.Parameter):
    """A weight of another class than torch's own."""


def _wrapped(model):
    head = model.lm_head
    head._parameters["weight"] = torch.Tensor._make_subclass(Wrapper, head.weight.data)


def _parametrize(model):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.down_proj)


def _swap_norm(model):
    model.model.layers[1].input_layernorm = nn.LayerNorm(64)


def _swap_linear(model):
    layer = model.model.layers[1].mlp
    layer.down_proj = type("Foreign", (nn.Linear,), {})(96, 64, bias=False)


def _layers_exchanged(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()


def _checkpointing(model):
    model.train()
    model.gradient_checkpointing_enable()


FORGETS_WHEN_CHECKPOINTING = Version(transformers.__version__) < Version("5.24")

# Each is a reason for stock: hooks, instances, modules, parameters, train mode, config, devices, dtypes, tensors.
CHANGES = {
    "hook on a layer": _hook("model.layers.1"),
    "hook on a linear": _hook("model.layers.0.mlp.up_proj"),
    "hook on the model": _hook(""),
    "pre-hook": _hook("model.layers.0.self_attn.q_proj", "register_forward_pre_hook"),
    "forward of the model": lambda model: setattr(model, "forward", lambda *args, **kwargs: None),
    "forward of a module": _attribute("model.layers.1.self_attn", "forward", lambda *args: None),
    "prepare_inputs": lambda model: setattr(model, "prepare_inputs_for_generation", lambda *args: None),
    "parametrized": _parametrize,
    "another norm": _swap_norm,
    "another linear": _swap_linear,
    "layers exchanged": _layers_exchanged,
    "a class swapped": lambda model: setattr(model.model.norm, "__class__", nn.LayerNorm),
    "dtype of one weight": _data("model.layers.1.mlp.down_proj.weight", lambda data: data.bfloat16()),
    "dtype of a norm": _data("model.layers.1.input_layernorm.weight", lambda data: data.double()),
    "dtype of all": lambda model: model.double(),
    "a weight elsewhere": lambda model: setattr(
        model.model.layers[0].mlp.down_proj, "weight", nn.Parameter(torch.empty(64, 96, device="meta"))
    ),
    "a buffer elsewhere": lambda model: setattr(
        model.model.rotary_emb, "inv_freq", torch.empty(8, device="meta")
    ),
    "attention dropout": _dropout,
    **({"checkpointing": _checkpointing} if FORGETS_WHEN_CHECKPOINTING else {}),
    "not causal, config": lambda model: setattr(model.config, "is_causal", False),
    "not causal, a layer": _attribute("model.layers.1.self_attn", "is_causal", False),
    "cache index": _attribute("model.layers.1.self_attn", "layer_idx", 0),
    "head size": _attribute("model.layers.1.self_attn", "head_dim", 8),
    "window": _attribute("model.layers.1.self_attn", "sliding_window", 4),
    "layer types": lambda model: setattr(model.config, "layer_types", ["sliding_attention"]),
    "layer types in place": lambda model: model.config.layer_types.pop(),
    "no attention": lambda model: setattr(model.config, "_attn_implementation", None),
    "epsilon of one head norm": _attribute("model.layers.0.self_attn.q_norm", "variance_epsilon", 0.1),
    "device map": lambda model: setattr(model, "hf_device_map", {"model": 0, "lm_head": "cpu"}),
    "an activation": _attribute("model.layers.1.mlp", "act_fn", nn.Softmax(dim=-1)),
    "an odd tensor": _attribute("model.layers.1", "kept", torch.empty(2, device="meta")),
    "partitioned": lambda model: setattr(model.model.norm.weight, "ds_id", 1),
    "no layers": lambda model: setattr(model.config, "num_hidden_layers", 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_look_that_found_nothing(change):
    """The reason is the one that a look without memory gives."""
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    for _ in range(2):
        assert engine.unsupported_reason() is None
    assert engine._executor.last_look() is not None
    CHANGES[change](model)
    reason = engine.unsupported_reason()
    engine._executor._look = None
    assert reason is not None and reason == engine.unsupported_reason()


def test_ambient_state_and_global_hooks():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    assert engine.unsupported_reason() is None
    with torch.autocast("cpu", torch.bfloat16):
        assert engine.unsupported_reason() is None
        model.set_attn_implementation("flex_attention")
        assert "autocast" in engine.unsupported_reason()
    assert engine.unsupported_reason() is None
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert "global" in engine.unsupported_reason()
    handle.remove()
    assert engine.unsupported_reason() is None


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe", "gemma3", "gpt-oss", "phi3"])
def test_an_unchanged_model_is_not_checked_in_full_again(variant, monkeypatch):
    model = tiny_model() if variant == "qwen3" else family_model(variant)
    engine = hf_paged.get_engine(hf_paged.enable(model))
    assert engine.unsupported_reason() is None
    key = engine._executor.state_key()

    def fail(*args):
        raise AssertionError("a full look")

    monkeypatch.setattr(eligibility, "_why_not_module", fail)
    monkeypatch.setattr(type(engine._executor), "constants", fail)
    assert engine.unsupported_reason() is None and engine._executor.state_key() == key


def test_constants_are_read_again_where_they_changed():
    model = hf_paged.enable(tiny_model())
    executor = hf_paged.get_engine(model)._executor
    key = executor.state_key()
    model.model.norm.variance_epsilon = 0.5
    other = executor.state_key()
    assert other != key
    model.model.norm.variance_epsilon = tiny_model().model.norm.variance_epsilon
    assert executor.state_key() == key


@pytest.mark.parametrize("change", CHANGES)
def test_the_quick_comparison_gives_the_digest_of_the_model_as_it_is(change):
    """In the middle of a call nobody compares tensors and hooks, of which the digest does not speak."""
    model = hf_paged.enable(tiny_model())
    executor = hf_paged.get_engine(model)._executor
    before = executor.state_key()
    CHANGES[change](model)

    def digest(**kwargs):
        try:
            return executor.state_key(**kwargs)
        except AttributeError:  # what stands there now has no such constant
            return None

    found = digest(compares_tensors=False)
    executor._look = None
    assert found == digest()
    assert found != before or change not in ("epsilon of one head norm", "head size", "window")


@pytest.mark.parametrize(("change", "quick"), [
    (_hook("model.layers.1"), True), (CHANGES["dtype of all"], True), (CHANGES["a weight elsewhere"], True),
    (CHANGES["epsilon of one head norm"], False), (CHANGES["another linear"], False),
    (lambda model: model.model.layers.append(nn.Identity()), False), (lambda model: model.train(), False),
    (_wrapped, False),
])
def test_the_quick_comparison_leaves_out_tensors_and_hooks_alone(change, quick):
    model = tiny_model()
    facts = ModelSnapshot(model)
    assert facts.hold(model) and facts.hold(model, with_tensors=False)
    change(model)
    assert not facts.hold(model) and facts.hold(model, with_tensors=False) is quick
    assert ModelSnapshot(model).hold(model, with_tensors=False) is (change is not _wrapped)


def test_facts_keep_nothing_alive():
    model = tiny_model()
    model.model.layers[0].parent = [model]  # a way back to the model
    model.model.layers[1].tensor = tensor = torch.ones(3)
    kept = model, tensor, model.model.layers[0], model.lm_head.weight
    facts, gone = ModelSnapshot(model), [weakref.ref(one) for one in kept]
    del kept
    del model, tensor
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4 and facts is not None


def _lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])).eval().get_base_model()


def _with(value):
    return lambda model: setattr(model, "kept", value) or model


@pytest.mark.parametrize("prepare", [
    _lora, _with([object.__new__(type("Thing", (), {})), [torch.ones(2)]]), _with({"a": (1, {2, 3})}),
    _with({"weight": Shard((4, 6), 1, ((0, 3),))}),
], ids=["lora", "list of objects", "atoms", "part of a rank"])
def test_facts_of_an_unchanged_model_hold(prepare):
    """Where they did not, every step of a stream would look at all modules anew."""
    model = prepare(tiny_model())
    assert ModelSnapshot(model).hold(model)


def _itself():
    value = [1]
    value.append(value)
    return value


@pytest.mark.parametrize(("container", "key"), [
    ([torch.ones(2)], 0), ({"a": torch.ones(2)}, "a"), ([{"a": torch.ones(2)}], 0),
    (OrderedDict(a=torch.ones(2)), "a"), (_itself(), 0),
    ({"weight": Shard((4, 6), 1, ((0, 3),))}, "weight"),
], ids=["list", "dict", "nested", "OrderedDict", "itself", "named tuple"])
def test_what_a_container_holds_is_looked_at(container, key):
    """`plain_tensors` finds tensors in containers of every class."""
    model = tiny_model()
    model.kept = copy.copy(container)
    facts = ModelSnapshot(model)
    model.kept[key] = torch.ones(2)
    assert not facts.hold(model)


def test_what_a_config_inside_a_container_says_is_looked_at():
    model = tiny_model()
    model.kept = [tiny_model().config]
    snapshot = ModelSnapshot(model)
    assert snapshot.hold(model)
    model.kept[0].sliding_window = 9
    assert not snapshot.hold(model)


def test_a_module_inside_itself_is_left_to_the_full_checks():
    model = tiny_model()
    model.model.layers[0].mlp.again = model.model.layers[0]
    assert not ModelSnapshot(model).hold(model)


def test_a_step_that_takes_in_requests_compares_once(monkeypatch):
    """However many of its parts ask whether the model is what it was."""
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    engine._executor.look()
    asked, hold = [], ModelSnapshot.hold
    monkeypatch.setattr(ModelSnapshot, "hold", lambda *args: asked.append(0) or hold(*args))
    with engine.session() as session:
        for token in (3, 4):  # idle, then busy
            engine.add(session, RequestSpec([token] * 20, 50, seed=0))
            asked.clear()
            engine.advance([session])[0]
            assert len(asked) == 1
        assert session.unfinished()


def test_code_of_the_user_between_two_looks_of_a_step_is_noticed(monkeypatch):
    """Where the model changed, what is in flight is committed first: stop rules and tokenizers run there."""
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    loop, norm = engine._core, model.model.norm
    commit = loop.commit_in_flight

    def commits_and_changes():
        norm.variance_epsilon = 0.25
        commit()

    with engine.session(stream=True) as session:
        engine.add(session, RequestSpec([3] * 20, 50, seed=0))
        engine.advance([session])[0]
        norm.variance_epsilon = 0.5
        monkeypatch.setattr(loop, "commit_in_flight", commits_and_changes)
        engine.advance([session])[0]
        monkeypatch.undo()
        assert norm.variance_epsilon == 0.25
        assert loop._state_key == loop._executor.state_key()


def test_another_thread_compares_for_itself():
    model = hf_paged.enable(tiny_model())
    executor = hf_paged.get_engine(model)._executor
    executor.look()
    with ThreadPoolExecutor(1) as thread, executor.watch.compared_once():
        assert executor.last_look() is not None
        model.config.layer_types.pop()
        assert executor.last_look() is not None
        assert thread.submit(executor.last_look).result() is None
    executor.look()
    model.model.norm.variance_epsilon = 0.5
    assert executor.last_look() is None


def test_what_another_thread_compares_never_counts_as_this_threads_comparison():
    """The other thread is between reading and writing while code of the user runs here."""
    executor = hf_paged.get_engine(hf_paged.enable(model := tiny_model()))._executor
    watch = executor.watch
    executor.look()
    with ThreadPoolExecutor(1) as thread, executor.watch.compared_once():
        assert thread.submit(executor.last_look).result() is not None
        assert not watch._compared
        assert executor.last_look() is not None
        assert watch._compared == {"structure"}
        assert executor.tensors() is executor.tensors()
        assert thread.submit(executor.tensors).result() is not executor.tensors()
    assert model is not None and executor.tensors() is not executor.tensors()


def test_weights_of_another_shape_in_as_many_bytes_are_checked_anew():
    """Kernels read weights without a look at their shapes, which are checked once for every state of the modules."""
    model = tiny_model()
    hf_paged.enable(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    executor = hf_paged.get_engine(model)._executor
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.shape[0] != weight.shape[1]
    weight.data = weight.data.t().contiguous()
    with pytest.raises(ValueError, match=r"layers\.0\..*weight"):
        executor.prepare(64)


def test_a_config_inside_of_a_config_is_compared_by_its_fields():
    """Image-text models hold their text config so; a call of one leaves the model as it was."""
    model = hf_paged.enable(image_model("qwen3-vl"), strict=True)
    call = {**batch([9]), "max_new_tokens": 2}
    model.generate(**call)
    snapshot, watch = ModelSnapshot(model), hf_paged.get_engine(model)._executor.watch
    structure = watch.structure(model)
    model.generate(**call)
    assert snapshot.hold(model) and watch.structure(model) == structure
    model.config.text_config.rms_norm_eps *= 2
    assert not snapshot.hold(model)
    model.config.text_config.rms_norm_eps /= 2
    assert snapshot.hold(model)
    model.config.text_config.rope_parameters["rope_theta"] += 1
    assert not snapshot.hold(model) and watch.structure(model) != structure


class Pair(NamedTuple):
    first: int
    second: list[int]


class OnePair(Pair):
    """Is made from no fields."""

    def __new__(cls):
        return super().__new__(cls, 1, [2])


def test_named_tuples_are_compared_whoever_makes_them():
    model = hf_paged.enable(tiny_model(), strict=True)
    watch = hf_paged.get_engine(model)._executor.watch
    for pair in (Pair(1, [2]), OnePair()):
        model.model.layers[0].mlp.pair = pair
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
        structure = watch.structure(model)
        assert watch.structure(model) == structure
        pair.second.append(3)
        assert watch.structure(model) != structure
