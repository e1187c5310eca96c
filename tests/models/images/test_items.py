"""Images of a call: what of its arguments belongs to each, and which keys are equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_paged.models.images.items import are_equal, divided

GRID = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 2, 2]])


def packed():
    return {"pixel_values": torch.arange(20.0).view(10, 2), "image_grid_thw": GRID}


def test_a_row_for_each_image():
    items = divided({"pixel_values": torch.arange(12.0).view(3, 2, 2), "image_sizes": GRID, "return_dict": True}, None)
    assert len(items) == 3
    assert [part.tolist() for part in items.parts(1)] == [[[[4.0, 5.0], [6.0, 7.0]]], [[1, 1, 2]]]
    only = items.only([2, 0])
    assert only.arguments["image_sizes"].tolist() == GRID[[2, 0]].tolist() and only.arguments["return_dict"] is True
    assert only.parts(0)[0].tolist() == items.parts(2)[0].tolist()


def test_as_many_rows_as_an_image_has_places_in_a_grid():
    items = divided(packed(), None)
    assert [len(items.parts(item)[0]) for item in range(3)] == [4, 2, 4]
    only = items.only([1, 2])
    assert torch.equal(only.arguments["pixel_values"], packed()["pixel_values"][4:])
    assert only.arguments["image_grid_thw"].tolist() == GRID[1:].tolist()
    assert [len(only.parts(item)[0]) for item in range(2)] == [2, 4]
    among = items.among(3)
    assert among.arguments["image_grid_thw"].tolist() == GRID[[0, 0, 0]].tolist()
    assert torch.equal(among.parts(1)[0], items.parts(0)[0]) and torch.equal(among.parts(2)[0], -items.parts(0)[0])


@pytest.mark.parametrize("changed", [
    {"pixel_values": torch.zeros(9, 2)}, {"image_grid_thw": GRID.float()}, {"image_grid_thw": GRID[:, :2]},
    {"image_grid_thw": GRID * torch.tensor([[1], [0], [1]]), "pixel_values": torch.zeros(8, 2)},
    {"further": torch.zeros(7, 2)}, {"further": torch.zeros(3)}, {"further": torch.tensor(1)},
    {"further": [1, 2, 3]}, {"further": object()}, {"pixel_values": torch.zeros(0, 2)},
    {"pixel_values": torch.zeros(10, 2).to_sparse()}, {"pixel_values": torch.zeros(10, 2, dtype=torch.complex128)},
    {"pixel_values": torch.nn.Parameter(torch.zeros(10, 2))}, {"pixel_values": torch.zeros(10, 0)},
])
def test_what_is_not_known(changed):
    assert divided(packed() | changed, SimpleNamespace(further=[1, 2])) is None


def test_settings_belong_to_no_image():
    items = divided(packed() | {"layers": [1, 2], "kind": "full"}, SimpleNamespace(layers=[1, 2]))
    assert len(items) == 3 and items.only([0]).arguments["layers"] == [1, 2]
    assert items.kind == divided(packed() | {"layers": [1, 2], "kind": "full"}, SimpleNamespace(layers=[1, 2])).kind
    assert items.kind != divided(packed() | {"layers": None, "kind": "full"}, None).kind
    assert divided({}, None) is None and divided({"pixel_values": None}, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
def test_keys_and_bits(dtype):
    pixels = torch.arange(12).view(3, 4).to(dtype)
    pixels[2] = pixels[0]
    items = divided({"pixel_values": pixels}, None)
    assert items.keys[0] == items.keys[2] and are_equal(items.parts(0), items.parts(2))
    assert items.keys[0] != items.keys[1]
    # In another order the numbers have the same sum.
    mixed = divided({"pixel_values": torch.cat([pixels[:1], pixels[:1].flip(1)])}, None)
    assert mixed.keys[0] == mixed.keys[1] and not are_equal(mixed.parts(0), mixed.parts(1))


def test_numbers_of_equal_value_may_have_other_bits():
    nan = torch.tensor([[float("nan"), 0.0], [float("nan"), 0.0], [float("nan"), -0.0]])
    items = divided({"pixel_values": nan}, None)
    assert are_equal(items.parts(0), items.parts(1)) and not are_equal(items.parts(0), items.parts(2))
    other = divided({"pixel_values": nan.double()}, None)
    assert items.keys[0] != other.keys[0]


def test_blank_images():
    pixels = torch.tensor([[0.0, -0.0], [1.0, -1.0], [0.0, 0.0]])
    assert divided({"pixel_values": pixels, "mask": torch.ones(3, 2, dtype=torch.int64)}, None).blank().tolist() == [
        True, False, True]
