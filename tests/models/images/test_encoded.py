"""Outputs of encoders, cut into the parts of images and put together again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from hf_paged.models.images.encoded import Encoded, split

ROWS = [torch.randn(length, 4, generator=torch.Generator().manual_seed(length)) for length in (2, 3, 1)]
LAST = torch.arange(6.0)


@dataclass
class WithLayers(ModelOutput):
    last_hidden_state: Any = None
    pooler_output: Any = None
    deepstack_features: Any = None


def whole() -> Any:
    raise AssertionError("it is read from no output of all images")


def again(output: Any, count: int, order: list[int], of_all=whole) -> Any:
    found = split(output, count)
    assert found is not None
    return found[0].joined([found[1][item] for item in order], of_all)


@pytest.mark.parametrize("kind", [list, tuple])
def test_rows_in_a_list(kind):
    found = again(BaseModelOutputWithPooling(pooler_output=kind(ROWS)), 3, [2, 0, 0, 1])
    assert type(found) is BaseModelOutputWithPooling and type(found.pooler_output) is kind
    assert all(own is ROWS[item] for own, item in zip(found.pooler_output, [2, 0, 0, 1], strict=True))
    assert found.last_hidden_state is None and list(found) == ["pooler_output"]


def test_rows_in_a_tensor():
    rows = torch.randn(2, 3, 4)
    found = again(BaseModelOutputWithPooling(pooler_output=rows), 2, [1, 0, 1])
    assert torch.equal(found.pooler_output, rows[[1, 0, 1]]) and torch.equal(found["pooler_output"], rows[[1, 0, 1]])


@pytest.mark.parametrize("kind", [list, tuple, torch.Tensor])
def test_adds_for_layers(kind):
    layers = [torch.cat(ROWS) * n if kind is torch.Tensor else kind(own * n for own in ROWS) for n in (2, 3)]
    found = again(WithLayers(pooler_output=tuple(ROWS), deepstack_features=layers), 3, [1, 1, 0])
    assert type(found.deepstack_features) is list and len(found.deepstack_features) == 2
    for n, layer in zip((2, 3), found.deepstack_features, strict=True):
        assert type(layer) is kind
        made = layer if kind is torch.Tensor else torch.cat(list(layer))
        assert torch.equal(made, torch.cat([ROWS[1], ROWS[1], ROWS[0]]) * n)


@pytest.mark.parametrize("output", [
    None, tuple(ROWS), BaseModelOutput(last_hidden_state=LAST), BaseModelOutputWithPooling(pooler_output=ROWS[:2]),
    BaseModelOutputWithPooling(pooler_output=torch.ones(3, 4)),
    BaseModelOutputWithPooling(pooler_output=[*ROWS[:2], None]), BaseModelOutputWithPooling(pooler_output=[LAST] * 3),
    WithLayers(pooler_output=ROWS, deepstack_features=[torch.ones(5, 4)]),
    WithLayers(pooler_output=ROWS, deepstack_features=[(3, ROWS)]),
    WithLayers(pooler_output=ROWS, deepstack_features=[torch.cat(ROWS), ROWS]),
])
def test_what_is_not_known(output):
    assert split(output, 3) is None


def test_further_fields_are_computed_when_they_are_read():
    made: list[int] = []

    def of_all() -> Any:
        made.append(1)
        return BaseModelOutputWithPooling(last_hidden_state=LAST)

    output = BaseModelOutputWithPooling(last_hidden_state=torch.ones(1), pooler_output=ROWS)
    found = again(output, 3, [0, 0], of_all)
    assert list(found) == ["last_hidden_state", "pooler_output"] and len(found.to_tuple()) == 2
    copy.deepcopy(found)
    assert not made
    state = found.last_hidden_state
    assert state.shape == (6,) and len(state) == 6 and state[2] == 2 and [*state][5] == 5
    assert torch.equal(torch.cat([state, state]), LAST.repeat(2)) and found[0].sum() == 15
    assert made == [1]


def test_rows_that_are_no_field():
    """Some classes set them on outputs of a class without them."""
    output = BaseModelOutput(last_hidden_state=LAST)
    output.pooler_output = ROWS
    found = again(output, 3, [1])
    assert found.pooler_output == [ROWS[1]] and list(found) == ["last_hidden_state"]


def test_rounding_is_close():
    one = Encoded(ROWS[0], (ROWS[1],))
    assert one.is_close(one.map(lambda rows: rows * (1 + 1e-6)))
    assert not one.is_close(one.map(lambda rows: rows * 1.01)) and not one.is_close(Encoded(ROWS[0]))
    assert not one.is_close(Encoded(ROWS[1], (ROWS[1],))) and not one.is_close(Encoded(ROWS[0], (-ROWS[1],)))
    low = one.map(torch.Tensor.bfloat16)
    assert low.is_close(low.map(lambda rows: rows * 1.01)) and not low.is_close(low.map(lambda rows: rows * 1.2))
