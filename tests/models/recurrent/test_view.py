"""A view of slots gives layers what stock's cache gives them, and writes into the slots of its rows alone."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import recurrent_model, with_idiom
from transformers import DynamicCache, Qwen3Config

from hf_paged.errors import UnsupportedModelError
from hf_paged.models.recurrent.view import StateView, cache_argument, keeps_states, recorder

pytestmark = with_idiom

CONV, STATE = (0, "conv", 0), (0, "recurrent", 0)


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def tensors():
    return {CONV: torch.full((4, 6, 3), float("nan")), STATE: torch.full((4, 2, 5), float("nan"), dtype=torch.float64)}


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_conv_states_are_those_of_stocks_cache(tensors, tokens):
    stock = DynamicCache(config=recurrent_model("Lfm2").config)
    for is_new, inputs in ((True, rand(1, 6, tokens)), (False, rand(1, 6, 2)), (False, rand(1, 6, 1))):
        view = StateView(tensors, torch.tensor([2]), is_new=is_new)
        assert (view.get_conv_state(0) is None) == is_new == (not view.has_previous_state(0))
        full = view.update_conv_state(inputs, 0, conv_kernel_size=3)
        assert torch.equal(full, stock.update_conv_state(inputs, 0, conv_kernel_size=3))
        view.update_recurrent_state(rand(1, 2, 5), 0)
        view.store()
        assert torch.equal(tensors[CONV][2:3], stock.get_conv_state(0))
    assert torch.isnan(tensors[CONV][[0, 1, 3]]).all() and torch.isnan(tensors[STATE][[0, 1, 3]]).all()


def test_a_state_that_a_layer_changes_in_place_is_stored(tensors):
    for tensor in tensors.values():
        tensor.copy_(rand(*tensor.shape))
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    view = StateView(tensors, torch.tensor([3, 1]), is_new=False)
    view.get_conv_state(0).add_(1.0)
    assert torch.equal(tensors[CONV], before[CONV])  # not before the end of the forward
    view.store()
    assert torch.equal(tensors[CONV][[3, 1]], before[CONV][[3, 1]] + 1.0)
    assert torch.equal(tensors[CONV][[0, 2]], before[CONV][[0, 2]]) and torch.equal(tensors[STATE], before[STATE])


def test_a_layer_that_asks_puts_back_what_another_changed():
    """So that the states of one layer are held at a time; those of new rows are put back together."""
    tensors = {(layer, "conv", 0): rand(3, 2, 2) for layer in (0, 4)}
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    view = StateView(tensors, torch.tensor([2, 0]), is_new=False)
    for layer in (0, 4):
        view.get_conv_state(layer).add_(1.0)
        assert list(view.held) == [(layer, "conv", 0)]
    assert torch.equal(tensors[0, "conv", 0][[2, 0]], before[0, "conv", 0][[2, 0]] + 1.0)
    assert torch.equal(tensors[4, "conv", 0], before[4, "conv", 0])
    view.get_conv_state(0).add_(1.0)
    view.store()
    for layer, added in ((0, 2.0), (4, 1.0)):
        torch.testing.assert_close(tensors[layer, "conv", 0][[2, 0]], before[layer, "conv", 0][[2, 0]] + added)
        assert torch.equal(tensors[layer, "conv", 0][1], before[layer, "conv", 0][1])


def test_a_state_keeps_the_dtype_of_its_slots(tensors):
    view = StateView(tensors, torch.tensor([0]), is_new=True)
    view.update_conv_state(rand(1, 6, 3), 0)
    view.update_recurrent_state(rand(1, 2, 5), 0)
    view.store()
    view = StateView(tensors, torch.tensor([0]), is_new=False)
    assert view.update_recurrent_state(rand(1, 2, 5).half(), 0).dtype == torch.float64


@pytest.mark.parametrize("make", [
    lambda view: view.update_conv_state(rand(1, 6, 3), 0),  # and no recurrent one
    lambda view: (view.update_conv_state(rand(1, 6, 4), 0), view.update_recurrent_state(rand(1, 2, 5), 0)),
    lambda view: (view.update_conv_state(rand(1, 6, 3), 1), view.update_recurrent_state(rand(1, 2, 5), 0)),
], ids=["missing", "shape", "layer"])
def test_a_forward_with_other_states_raises(tensors, make):
    view = StateView(tensors, torch.tensor([0]), is_new=True)
    make(view)
    with pytest.raises(UnsupportedModelError, match="state"):
        view.store()


def test_which_models_keep_states():
    model = recurrent_model("Lfm2")
    assert keeps_states(model.config) and not keeps_states(Qwen3Config())
    view = recorder()
    assert cache_argument(type(model).forward) is not None
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), use_cache=True, **{cache_argument(type(model).forward): view})
    assert {key: tuple(state.shape) for key, state in view.held.items()} == {
        (0, "conv", 0): (1, 64, 3), (2, "conv", 0): (1, 64, 3)}
