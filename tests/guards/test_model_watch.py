"""The numbers of a model: a change moves the number of what it changes, and no other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny_model
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from hf_paged.guards.model_watch import ModelWatch, ModuleSnapshot


def hook(*_):
    pass


def layer(model):
    return model.model.layers[1]


def swap(model):
    layer(model).self_attn.o_proj = nn.Linear(64, 64)


def add(model):
    layer(model).mlp.more = nn.Identity()


CHANGES = {
    "hook": lambda model: layer(model).mlp.down_proj.register_forward_hook(hook),
    "pre-hook": lambda model: layer(model).self_attn.register_forward_pre_hook(hook),
    "forward": lambda model: setattr(layer(model).mlp.up_proj, "forward", hook),
    "another module": swap,
    "one more module": add,
    "no module": lambda model: setattr(layer(model).mlp, "up_proj", None),
    "another layer": lambda model: model.model.layers.__setitem__(0, model.model.layers[1]),
    "fewer layers": lambda model: model.model.layers.pop(-1),
    "another root": lambda model: setattr(model, "model", Qwen3Model(model.config)),
    "another norm": lambda model: setattr(model.model, "norm", nn.LayerNorm(64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change):
    model = tiny_model()
    watch = ModuleSnapshot(model.model)
    assert watch.holds(model.model)
    change(model)
    assert not watch.holds(model.model)
    assert ModuleSnapshot(model.model).holds(model.model)


def test_a_hook_that_went_is_noticed_and_one_that_came_and_went_is_none():
    model = tiny_model()
    handle = layer(model).mlp.register_forward_hook(hook)
    watch = ModuleSnapshot(model.model)
    other = layer(model).mlp.down_proj.register_forward_hook(hook)
    other.remove()
    assert watch.holds(model.model)
    handle.remove()
    assert not watch.holds(model.model)


def weight(model):
    return layer(model).self_attn.q_proj.weight


def in_place(change):
    def apply(model):
        with torch.no_grad():
            change(weight(model))

    return apply


def _optimizer_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _data(change):
    return lambda model: setattr(weight(model), "data", change(weight(model).data))


def _parameter(change):
    return lambda model: setattr(layer(model).self_attn.q_proj, "weight", nn.Parameter(change(weight(model).data)))


def _hook_came_and_went(model):
    layer(model).register_forward_hook(hook).remove()


def _buffer(change):
    def apply(model):
        rotary = model.model.rotary_emb
        rotary.inv_freq = change(rotary.inv_freq)

    return apply


def _attribute(model):
    layer(model).mlp.kept = torch.ones(3)


STRUCTURE, PLACES, CONTENTS = "structure", "places", "contents"
WEIGHT = {PLACES, CONTENTS}
EVERYTHING = {STRUCTURE, *WEIGHT}
# What becomes of a model, and the numbers that move.
MOVES = {
    "a hook": (CHANGES["hook"], {STRUCTURE}),
    "a forward": (lambda model: setattr(layer(model).mlp.up_proj, "forward", lambda hidden: hidden), {STRUCTURE}),
    "an epsilon": (lambda model: setattr(model.model.norm, "variance_epsilon", model.model.norm.variance_epsilon / 2),
                   {STRUCTURE}),
    "a field of the config": (lambda model: setattr(model.config, "sliding_window", (model.config.sliding_window or 0)
                                                    + 1), {STRUCTURE}),
    "train mode": (lambda model: model.train(not model.training), {STRUCTURE}),
    "layers exchanged": (lambda model: model.model.layers.insert(0, model.model.layers.pop(-1)), EVERYTHING),
    "another module": (CHANGES["another module"], EVERYTHING),
    "a module like it": (lambda model: setattr(layer(model).mlp, "act_fn", nn.SiLU()), {STRUCTURE}),
    "another dtype": (_data(lambda data: data.double() if data.dtype == torch.float32 else data.float()), EVERYTHING),
    "a tensor in an attribute": (_attribute, EVERYTHING),
    "pointed elsewhere": (_data(torch.clone), WEIGHT),
    "other strides": (_data(torch.t), WEIGHT),
    "another parameter": (_parameter(torch.clone), WEIGHT),
    "another parameter over the same memory": (_parameter(lambda data: data), WEIGHT),
    "weights assigned": (lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True), WEIGHT),
    "a buffer elsewhere": (_buffer(torch.clone), {PLACES}),
    "written in place": (in_place(lambda own: own.mul_(2)), {CONTENTS}),
    "a step of an optimizer": (_optimizer_step, {CONTENTS}),
    "weights loaded": (lambda model: model.load_state_dict(model.state_dict()), {CONTENTS}),
    "a hook that came and went": (_hook_came_and_went, set()),
    "a buffer written in place": (lambda model: model.model.rotary_emb.inv_freq.mul_(2), set()),
    "written through data": (lambda model: weight(model).data.mul_(2), set()),  # left to the checksum
}


def numbers(watch, model):
    return {STRUCTURE: watch.structure(model), PLACES: watch.places(model), CONTENTS: watch.contents(model)}


def moved(before, after):
    return {kind for kind in before if before[kind] != after[kind]}


def test_each_number_moves_by_some_change_alone():
    assert {kind for _, kinds in MOVES.values() if len(kinds) == 1 for kind in kinds} == EVERYTHING


@given(changes=st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=5), asked=st.permutations(
    [ModelWatch.structure, ModelWatch.places, ModelWatch.contents]))
def test_a_change_moves_its_numbers_and_no_others(changes, asked):
    """Whatever came before it, and whichever number is asked for first."""
    model, watch = tiny_model(), ModelWatch()
    for tensor in (*model.parameters(), *model.buffers()):
        vars(tensor).clear()  # marks of transformers, which other tensors would not have
    before, seen = numbers(watch, model), set()
    for name in changes:
        change, expected = MOVES[name]
        change(model)
        for number in asked:
            number(watch, model)
        after = numbers(watch, model)
        assert moved(before, after) == expected, name
        assert not seen & set(after.values()) - set(before.values()), "a number came again"
        seen |= set(before.values())
        before = after


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_number_of_a_step_is_a_new_one_behind_a_change_of_modules(change):
    model, watch = tiny_model(), ModelWatch()
    first = watch.step_structure(model)
    assert first == watch.step_structure(model) == watch.structure(model)
    change(model)
    second = watch.step_structure(model)
    assert second != first
    assert second == watch.step_structure(model) == watch.structure(model)


@pytest.mark.parametrize("name", sorted(MOVES))
def test_the_number_of_a_steps_contents_moves_with_parameters_and_modules(name):
    """Copies of weights are made anew then. Nobody compares attributes, configs and buffers in every step."""
    model, watch = tiny_model(), ModelWatch()
    first = watch.step_contents(model)
    assert first == watch.step_contents(model)
    MOVES[name][0](model)
    moves = CONTENTS in MOVES[name][1] or name in ("a hook", "a forward", "a module like it")
    assert (watch.step_contents(model) != first) == (moves and name != "a tensor in an attribute")
    assert watch.step_contents(model) == watch.step_contents(model)


def test_weights_made_under_inference_mode_have_no_versions_and_are_compared_by_their_places():
    model, watch = tiny_model(), ModelWatch()
    with torch.inference_mode():
        _data(torch.clone)(model)
    before = numbers(watch, model)
    assert numbers(watch, model) == before
    with torch.inference_mode():
        weight(model).mul_(2)
        assert numbers(watch, model) == before  # left to the checksum
        _data(torch.clone)(model)
    assert moved(before, numbers(watch, model)) == WEIGHT


def test_only_modules_that_are_watched_are_kept_alive():
    model, watch = tiny_model(), ModelWatch()
    numbers(watch, model)
    kept = weakref.ref(layer(model)), weakref.ref(weight(model))
    watch.watch_modules(model)
    del model
    gc.collect()
    assert all(reference() is not None for reference in kept)
    watch.release_modules()
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_tensors_that_moved_inside_of_a_block_are_compared_again_when_asked():
    model, watch = tiny_model(), ModelWatch()
    with watch.compared_once():
        before = numbers(watch, model)
        for name in ("a hook", "pointed elsewhere", "written in place"):
            MOVES[name][0](model)
        assert numbers(watch, model) == before
        watch.compare_again()
        assert moved(before, numbers(watch, model)) == EVERYTHING
