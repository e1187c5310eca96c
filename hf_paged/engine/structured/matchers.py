"""Grammars that outputs follow token by token, and matchers, which hold the position of an output in its grammar."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Matcher(Protocol):
    """Protocol of a matcher, which holds the position of one output in its grammar."""

    @property
    def is_over(self) -> bool:
        """Whether the output has ended: by a stop token, or because no token can follow and there is no stop token."""

    def accept(self, token: int) -> bool:
        """Advance by a token; returns False, and does not advance, if the grammar does not allow the token."""

    def fill(self, words: torch.Tensor) -> None:
        """Write a bit mask of the tokens that may follow to ``words`` [W] int32 on the CPU (see `TokenMasks`)."""


class Grammar(Protocol):
    """Protocol of a compiled grammar, which any number of outputs may follow."""

    def matcher(self, eos: tuple[int, ...]) -> Matcher:
        """Return a matcher at the start of an output that ends at one of ``eos``."""


class XGrammar:
    """A grammar of xgrammar.

    Args:
        compiled: a `xgrammar.CompiledGrammar`.
        keeps_stop_tokens: only the stop tokens that the grammar was compiled with may follow a complete output.
            Otherwise the request's EOS tokens that are such stop tokens or special tokens may follow or, if there are
            none, all of its EOS tokens. A token that may follow a complete output cannot occur inside of one.
        special: the special tokens of the tokenizer.
    """

    def __init__(self, compiled: Any, *, keeps_stop_tokens: bool = False,
                 special: frozenset[int] = frozenset()) -> None:
        self._compiled = compiled
        self._keeps_stop_tokens = keeps_stop_tokens
        self._special = special

    @property
    def nbytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self, eos: tuple[int, ...]) -> XGrammarMatcher:
        from xgrammar import GrammarMatcher

        own, num_tokens = self._compiled.tokenizer_info.stop_token_ids, self._compiled.tokenizer_info.vocab_size
        eos = tuple(token for token in eos if 0 <= token < num_tokens)  # other ids cannot occur
        known = self._special.union(own)
        stops = own if self._keeps_stop_tokens else [token for token in eos if token in known] or list(eos) or own
        return XGrammarMatcher(GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None), bool(stops),
                               -(-num_tokens // 32))

    def may_begin(self) -> bool:
        matcher = self.matcher(())
        return matcher.is_over or not matcher.is_at_end()


class XGrammarMatcher:
    """The `Matcher` of an `XGrammar`.

    Attributes:
        inner: the `xgrammar.GrammarMatcher`.
    """

    def __init__(self, inner: Any, has_stops: bool, num_words: int) -> None:
        self.inner = inner
        self._has_stops, self._num_words = has_stops, num_words
        self.is_over = False

    def accept(self, token: int) -> bool:
        if self.is_over or not self.inner.accept_token(token):
            return False
        self.is_over = self.inner.is_terminated() if self._has_stops else self.is_at_end()
        return True

    def fill(self, words: torch.Tensor) -> None:
        self.inner.fill_next_token_bitmask(words[None])

    def fork(self) -> XGrammarMatcher:
        copy = XGrammarMatcher(self.inner.fork(), self._has_stops, self._num_words)
        copy.is_over = self.is_over
        return copy

    def is_at_end(self) -> bool:
        """Return whether no token can follow."""
        words = torch.empty(self._num_words, dtype=torch.int32, device="cpu")
        self.fill(words)
        return not words.any()


class OutlinesIndex:
    """The `Grammar` of an `outlines_core.Index`, which allows a row the same tokens as Outlines' logits processor."""

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
