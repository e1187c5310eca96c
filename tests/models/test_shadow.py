"""Shadows: copies follow what they are copies of, and know their size."""

from __future__ import annotations

import torch

from hf_paged.models.shadow import Shadow, side_by_side


def test_copies_are_made_where_the_checksum_changed_and_where_there_is_none():
    source, target = torch.randn(4, 3), torch.empty(4, 3, dtype=torch.bfloat16)
    shadow = Shadow([target])
    shadow.refresh([source], torch.tensor([7]))
    assert torch.equal(target, source.bfloat16())
    old = target.clone()
    source.add_(1)
    shadow.refresh([source], torch.tensor([7]))  # the same weights, it says
    assert torch.equal(target, old)
    shadow.refresh([source], torch.tensor([8]))
    assert torch.equal(target, source.bfloat16())
    source.add_(1)
    shadow.refresh([source])
    assert torch.equal(target, source.bfloat16())
    source.add_(1)
    shadow.refresh([source], torch.tensor([8]))  # nobody knows which weights those of before were
    assert torch.equal(target, source.bfloat16())


def test_a_checksum_that_its_maker_writes_to_again_is_not_the_one_of_before():
    source, target, checksum = torch.randn(3), torch.empty(3, dtype=torch.half), torch.tensor([1])
    shadow = Shadow([target])
    shadow.refresh([source], checksum)
    source.add_(1)
    checksum.fill_(2)
    shadow.refresh([source], checksum)
    assert torch.equal(target, source.half())


def test_staleness_is_told_by_address_and_version():
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    shadow = Shadow([torch.empty(4, 3, dtype=torch.bfloat16)])
    assert shadow.is_stale([parameter])
    shadow.refresh([parameter])
    assert not shadow.is_stale([parameter])
    with torch.no_grad():
        parameter.mul_(2)
    assert shadow.is_stale([parameter])
    shadow.refresh([parameter])
    parameter.data = parameter.data.clone()
    assert shadow.is_stale([parameter])


def test_bytes_count_each_memory_once():
    weights = [torch.randn(4, 8), torch.randn(2, 8)]
    merged, parts = side_by_side(weights, torch.bfloat16)
    shadow = Shadow([*parts, torch.empty(5, dtype=torch.float16)])
    assert shadow.nbytes == 6 * 8 * 2 + 5 * 2
    shadow.refresh([*weights, torch.zeros(5)])
    assert torch.equal(merged, torch.cat(weights).bfloat16())


def test_memory_made_under_inference_mode_is_written_outside_it():
    with torch.inference_mode():
        source = torch.randn(3)
        shadow = Shadow([torch.empty(3, dtype=torch.bfloat16)])
        shadow.refresh([source])
        assert not shadow.is_stale([source])
