"""Grammars that outputs follow token by token, and where each output is in its grammar."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Matcher(Protocol):
    """Where one output is in its grammar."""

    @property
    def is_over(self) -> bool:
        """Has the output ended: by a stop token, or because nothing can follow and there is no stop token?"""

    def accept(self, token: int) -> bool:
        """Go on by a token; False, going nowhere, where the grammar does not allow it."""

    def fill(self, words: torch.Tensor) -> None:
        """Write which tokens may follow to ``words`` [W] int32 on the CPU (see `TokenMasks`)."""


class Grammar(Protocol):
    """A compiled grammar, which any number of outputs may follow."""

    def matcher(self, eos: tuple[int, ...]) -> Matcher:
        """At the begin of an output that ends at one of ``eos``."""


class XGrammar:
    """A grammar of xgrammar.

    Args:
        compiled: a `xgrammar.CompiledGrammar`.
        keeps_stop_tokens: a complete output may be followed by the stop tokens that the grammar was compiled with, and
            by no others; otherwise by what ends the request and is one of those, or a special token; or else by all
            that ends the request. What may follow a complete output does not stand inside of one.
        special: the special tokens of the tokenizer.
    """

    def __init__(self, compiled: Any, *, keeps_stop_tokens: bool = False,
                 special: frozenset[int] = frozenset()) -> None:
        self._compiled = compiled
        self._keeps_stop_tokens = keeps_stop_tokens
        self._special = special

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self, eos: tuple[int, ...]) -> XGrammarMatcher:
        from xgrammar import GrammarMatcher

        own, num_tokens = self._compiled.tokenizer_info.stop_token_ids, self._compiled.tokenizer_info.vocab_size
        eos = tuple(token for token in eos if 0 <= token < num_tokens)  # others never come
        known = self._special.union(own)
        stops = own if self._keeps_stop_tokens else [token for token in eos if token in known] or list(eos) or own
        return XGrammarMatcher(GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None), bool(stops),
                               -(-num_tokens // 32))

    def may_begin(self) -> bool:
        """Is there a token that an output can begin with?"""
        matcher = self.matcher(())
        return matcher.is_over or not matcher.is_at_end()


class XGrammarMatcher:
    """`Matcher` of an `XGrammar`.

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
        """Another one, at the same place."""
        copy = XGrammarMatcher(self.inner.fork(), self._has_stops, self._num_words)
        copy.is_over = self.is_over
        return copy

    def is_at_end(self) -> bool:
        """Can no token follow?"""
        words = torch.empty(self._num_words, dtype=torch.int32, device="cpu")
        self.fill(words)
        return not words.any()
