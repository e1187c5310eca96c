"""Masks that a model's own code hands to its decoder, as the positions that each token sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.errors import Reason
from hf_paged.models.base import AttentionMask
from hf_paged.models.images.fed_prompt import plain_sight

STAYS_IN_STOCK = "Calls with text alone run natively."
Sights = Mapping[int | None, np.ndarray]  # by the window of attention calls, `FedPrompt.sights`


def sights_of(given: Any, lengths: Sequence[int], masks: Sequence[AttentionMask]) -> list[Sights] | Reason:
    """Return for each row which positions its tokens see, where that is not what packed steps attend to; or why packed
    steps cannot.

    Args:
        given: what the decoder is given: a mask or None, or one for each type of its layers. Of masks of two dims,
            which say where padding is, the decoder makes those of its layers.
        lengths: tokens of each row, behind its padding.
        masks: of the decoder's attention calls.
    """
    windows = {mask.window for mask in masks}
    found: list[dict[int | None, np.ndarray]] = [{} for _ in lengths]
    for kind, mask in (given if isinstance(given, dict) else {"": given}).items():
        if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            continue
        own = [window for window in windows if not kind or (window is not None) == ("sliding" in kind)]
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or len(own) != 1 or any(one.chunk for one in masks):
            return Reason("images of a model whose decoder is given {}", f"a mask of type {type(mask).__name__}",
                          remedy=STAYS_IN_STOCK)
        allowed = (mask if mask.dtype == torch.bool else mask == 0).cpu().numpy()
        for row, length in enumerate(lengths):
            sight = _sight(allowed[row if len(allowed) > 1 else 0, 0, -length:, -length:])
            if sight is None:
                return Reason("images of a model whose decoder is given {}", "a mask with holes", remedy=STAYS_IN_STOCK)
            if not np.array_equal(sight, plain_sight(length, own[0])):
                found[row][own[0]] = sight
    return list(found)


def _sight(allowed: np.ndarray) -> np.ndarray | None:
    """Return the first and the last position [2, T] that each token sees by a mask [T, T]; None if it sees not all in
    between, or nothing."""
    keys = np.arange(len(allowed))
    first, last = allowed.argmax(1), len(allowed) - 1 - allowed[:, ::-1].argmax(1)
    again = (first[:, None] <= keys) & (keys <= last[:, None])
    return np.stack([first, last]) if np.array_equal(again, allowed) else None
