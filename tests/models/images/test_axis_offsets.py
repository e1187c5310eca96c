"""Offsets of positions on axes, per slot."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.models.images.axis_offsets import AxisOffsets
from hf_paged.models.images.fed_prompt import FedPrompt

CPU = torch.device("cpu")
IMAGE = FedPrompt([1, 2, 3, 4], (), np.array([[0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 1, 5]]))


def positions(offsets: AxisOffsets, *slots: int) -> list[list[int]]:
    fed = offsets.fed(torch.tensor(slots), torch.full((len(slots),), 10))
    assert fed is not None and not fed.rows and not fed.seen
    return fed.positions.T.tolist()


def test_nothing_until_a_prompt_differs_and_zeros_for_the_next_in_its_slot():
    offsets = AxisOffsets(3, CPU)
    offsets.admit([0, 2], [None, FedPrompt([1], ())])
    assert offsets.fed(torch.tensor([0]), torch.tensor([5])) is None and offsets.moves == 0
    offsets.admit([2, 1], [IMAGE, None])
    assert offsets.moves == 1
    assert positions(offsets, 0, 1, 2, 3) == [[10] * 3, [10] * 3, [10, 9, 12], [10] * 3]
    offsets.grow(5)
    offsets.admit([4], [IMAGE])
    assert positions(offsets, 2, 3, 4, 5) == [[10, 9, 12], [10] * 3, [10, 9, 12], [10] * 3]
    offsets.admit([2, 4], [])  # rows in lockstep
    assert positions(offsets, 2, 4) == [[10] * 3] * 2 and offsets.moves == 1
