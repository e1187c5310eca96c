"""Copies of linear layers' weights: their memory goes and comes back to its addresses, over a fake driver."""

from __future__ import annotations

import pytest
import torch
from fake_driver import lent_driver
from torch import nn

from hf_paged.device.virtual_memory import DriverError
from hf_paged.models.copied_weights import CopiedWeights

driver = pytest.fixture(lent_driver, name="driver")


def groups(bias=True):
    torch.manual_seed(0)
    return {"qkv": (nn.Linear(5, 7, bias=bias), nn.Linear(5, 3, bias=bias)), "o": (nn.Linear(3, 11, bias=bias),)}


def assert_copies(copied, of):
    for name, linears in of.items():
        weight, bias = copied.by_name[name]
        assert torch.equal(weight, torch.cat([linear.weight for linear in linears]).bfloat16())
        if linears[0].bias is not None:
            assert torch.equal(bias, torch.cat([linear.bias for linear in linears]).bfloat16())
        else:
            assert bias is None


@pytest.mark.parametrize("bias", [False, True])
def test_copies_go_and_come_back_to_where_they_were(driver, bias):
    of = groups(bias)
    copied = CopiedWeights(of, torch.bfloat16)
    copied.refresh(of, torch.tensor([1]))
    assert_copies(copied, of)
    places = [tensor.data_ptr() for tensor in copied.tensors()]
    assert len(places) == 2 + 2 * bias and all(place % 512 == 0 for place in places)
    assert copied.is_here and copied.nbytes >= sum(t.nbytes for t in copied.tensors()) and driver.in_use
    driver.start_work()
    assert copied.unmap() and not copied.is_here
    assert (copied.tensors(), copied.nbytes, driver.in_use) == ([], 0, 0)
    copied.restore()
    copied.refresh(of, torch.tensor([1]))  # of the same weights, but what was made of them is gone
    assert_copies(copied, of)
    assert [tensor.data_ptr() for tensor in copied.tensors()] == places
    made = driver.counts["create"]
    copied.restore()
    assert driver.counts["create"] == made
    del copied


def test_too_little_memory_is_said_and_can_be_tried_again(driver):
    of = groups()
    copied = CopiedWeights(of, torch.bfloat16)
    assert copied.unmap()
    free, driver.free = driver.free, 0
    with pytest.raises(torch.OutOfMemoryError):
        copied.restore()
    assert not copied.is_here and driver.in_use == 0
    driver.free = free
    copied.restore()
    copied.refresh(of, None)
    assert_copies(copied, of)
    del copied


@pytest.mark.parametrize("name", ["reserve", "create", "map", "allow"])
def test_a_driver_that_refuses_leads_to_torchs_memory(driver, name):
    def script(called):
        if called == name:
            raise DriverError(f"{name} is not to be had")

    driver.script = script
    of = groups()
    copied = CopiedWeights(of, torch.bfloat16)
    copied.refresh(of, None)
    assert_copies(copied, of)
    assert driver.is_empty() and not copied.unmap()
    assert_copies(copied, of)


def test_where_nothing_is_copied_nothing_is_reserved(driver):
    copied = CopiedWeights(groups(), torch.float32)
    assert copied.is_here and not copied.unmap() and not driver.counts


def test_copies_are_made_where_the_checksum_changed_and_where_there_is_none():
    of = groups()
    copied = CopiedWeights(of, torch.bfloat16)

    def change():
        with torch.no_grad():
            of["o"][0].weight.add_(1)

    copied.refresh(of, torch.tensor([7]))
    assert_copies(copied, of)
    old = [tensor.clone() for tensor in copied.tensors()]
    change()
    copied.refresh(of, torch.tensor([7]))  # the same weights, it says
    assert all(map(torch.equal, copied.tensors(), old))
    copied.refresh(of, torch.tensor([8]))
    assert_copies(copied, of)
    change()
    copied.refresh(of, None)
    assert_copies(copied, of)
    change()
    copied.refresh(of, torch.tensor([8]))  # which weights those of before were is unknown
    assert_copies(copied, of)


def test_a_checksum_that_its_maker_writes_to_again_is_not_the_one_of_before():
    of, checksum = groups(), torch.tensor([1])
    copied = CopiedWeights(of, torch.bfloat16)
    copied.refresh(of, checksum)
    with torch.no_grad():
        of["o"][0].weight.add_(1)
    checksum.fill_(2)
    copied.refresh(of, checksum)
    assert_copies(copied, of)


def test_bytes_are_those_of_the_memory():
    copied = CopiedWeights(groups(), torch.bfloat16)
    assert copied.nbytes == 2 * (5 * 10 + 10 + 3 * 11 + 11) == sum(tensor.nbytes for tensor in copied.tensors())


def test_memory_made_under_inference_mode_is_written_outside_it():
    of = groups()
    with torch.inference_mode():
        copied = CopiedWeights(of, torch.bfloat16)
        copied.refresh(of, None)
    copied.refresh(of, None)
    assert_copies(copied, of)
