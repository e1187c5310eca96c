"""Outlines' automata (`outlines_core`) as grammars that allow a row the same tokens as Outlines' logits processor."""

from __future__ import annotations

from typing import Any

import torch


class OutlinesIndex:
    """The `Grammar` of an `outlines_core.Index`."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def matcher(self, eos: tuple[int, ...]) -> OutlinesMatcher:
        from outlines_core import Guide

        return OutlinesMatcher(Guide(self._index))


class OutlinesMatcher:
    """The `Matcher` of an `OutlinesIndex`. The request's own EOS ends the output."""

    is_over = False

    def __init__(self, guide: Any) -> None:
        self._guide = guide

    def accept(self, token: int) -> bool:
        try:
            # As in Outlines, a finished guide ignores a token that it does not accept.
            if not self._guide.is_finished() or self._guide.accepts_tokens([token]):
                self._guide.advance(token_id=token, return_tokens=False)
        except Exception:  # its Rust code has no such transition
            return False
        return True

    def fill(self, words: torch.Tensor) -> None:
        self._guide.write_mask_into(words.data_ptr(), words.numel(), words.element_size())
