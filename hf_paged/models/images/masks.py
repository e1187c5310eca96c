"""Masks that a model's own code hands to its decoder, compared with those that packed steps attend by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.errors import Reason
from hf_paged.models.base import AttentionMask

STAYS_IN_STOCK = "Calls with text alone run natively."


def why_not_mask(given: Any, lengths: Sequence[int], masks: Sequence[AttentionMask]) -> Reason | None:
    """Return why a decoder's mask is not that of packed steps, or None.

    Args:
        given: what the decoder is given: a mask or None, or one for each type of its layers. Of masks of two dims,
            which say where padding is, the decoder makes those of its layers.
        lengths: tokens of each row, behind its padding.
        masks: of the decoder's attention calls.
    """
    windows = {mask.window for mask in masks}
    for kind, mask in (given if isinstance(given, dict) else {"": given}).items():
        if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            continue
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or any(one.chunk is not None for one in masks):
            return Reason("images of a model whose decoder is given a mask of type {}", type(mask).__name__,
                          remedy=STAYS_IN_STOCK)
        own = [window for window in windows if (window is not None) == ("sliding" in kind)] if kind else list(windows)
        if len(own) != 1 or not _is_causal(mask, lengths, own[0]):
            return Reason("images of a model whose tokens see later ones", remedy=STAYS_IN_STOCK)
    return None


def _is_causal(mask: torch.Tensor, lengths: Sequence[int], window: int | None) -> bool:
    """Return whether a mask [B or 1, 1, T, T] lets the tokens of each row see those before them, as far as a window."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    for row, length in enumerate(lengths):
        own = allowed[row if len(allowed) > 1 else 0, 0, -length:, -length:]
        expected = torch.ones(length, length, dtype=torch.bool, device=own.device).tril()
        if window is not None:
            expected = expected.triu(1 - window)
        if not torch.equal(own, expected):
            return False
    return True
