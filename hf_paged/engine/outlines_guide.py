"""Outlines' own automata as grammars: what its processor over `outlines_core` would allow a row."""

from __future__ import annotations

from typing import Any

import torch


class OutlinesIndex:
    """`Grammar` of an `outlines_core.Index`."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def matcher(self, eos: tuple[int, ...]) -> OutlinesMatcher:
        from outlines_core import Guide

        return OutlinesMatcher(Guide(self._index))


class OutlinesMatcher:
    """`Matcher` of an `OutlinesIndex`. The request's own EOS ends the output."""

    is_over = False

    def __init__(self, guide: Any) -> None:
        self._guide = guide

    def accept(self, token: int) -> bool:
        try:
            # Where it is finished, Outlines stays there for any token that does not go on.
            if not self._guide.is_finished() or self._guide.accepts_tokens([token]):
                self._guide.advance(token_id=token, return_tokens=False)
        except Exception:  # of its Rust: no such transition
            return False
        return True

    def fill(self, words: torch.Tensor) -> None:
        self._guide.write_mask_into(words.data_ptr(), words.numel(), words.element_size())
