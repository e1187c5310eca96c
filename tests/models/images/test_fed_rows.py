"""Which steps feed the decoder of prompts with images more than graphs do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.models.images.fed_rows import FedRows
from hf_paged.scheduler import Sequence

IMAGE = FedPrompt([1, 2, 3, 4], (), np.array([[0, 1, 1, 2]]))


def in_slot(slot: int, fed: FedPrompt | None) -> Sequence:
    made = Sequence(f"r{slot}", [1, 2, 3, 4], max_new_tokens=8, fed=fed)
    made.slot = slot
    return made


def step(*rows: tuple[Sequence, int], num_prompts: int = 0) -> Any:
    """One token of each sequence from a position on, the last ones in prompts."""
    sequences, starts = zip(*rows, strict=True)
    return SimpleNamespace(
        sequences=sequences, slots=np.array([s.slot for s in sequences]), start=np.array(starts),
        num_new_tokens=np.ones(len(rows), np.int64), num_decode_rows=len(rows) - num_prompts)


def test_decode_rows_feed_while_they_are_in_a_prompt():
    rows = FedRows(16)
    image, text, late = in_slot(1, IMAGE), in_slot(0, None), in_slot(9, FedPrompt([1, 2, 3, 4], ()))
    rows.admit([image, text])
    assert rows.feeds(step((text, 0), (image, 3))) and not rows.feeds(step((text, 0), (image, 4)))
    assert not rows.feeds(step((text, 1), (in_slot(5, None), 0))), "a slot that nothing was admitted to"
    rows.admit([late])
    assert rows.feeds(step((image, 4), (late, 3))) and not rows.feeds(step((image, 4), (late, 4)))


def test_a_slot_that_text_has_now():
    rows, text = FedRows(16), in_slot(1, None)
    rows.admit([in_slot(1, IMAGE), in_slot(2, IMAGE)])
    rows.admit([text])
    assert not rows.feeds(step((text, 0)))


def test_output_that_is_computed_again_has_positions_of_its_own():
    """As a prompt, where graphs count positions alike on each axis."""
    rows, image, plain = FedRows(16), in_slot(0, IMAGE), in_slot(1, FedPrompt([1, 2, 3, 4], ()))
    rows.admit([image, plain])
    assert rows.feeds(step((image, 6), num_prompts=1)) and not rows.feeds(step((plain, 6), num_prompts=1))
