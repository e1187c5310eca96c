"""Grammars of structured output: compiled by xgrammar for a tokenizer, and followed token by token."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

import torch

from hf_paged.engine.stopping import tokenizer_traits
from hf_paged.kernels._device import num_cores
from hf_paged.optional import require
from hf_paged.options.structured import STRUCTURAL_TAG, Structured, choices_as_grammar

_CACHED_BYTES = 256 << 20  # of compiled grammars, per tokenizer
THREADS = max(1, min(12, num_cores() * 3 // 4))  # of xgrammar: more take longer to start than they save


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
            by no others; otherwise by those of them that end the request, or else by all that do.
    """

    def __init__(self, compiled: Any, *, keeps_stop_tokens: bool = False) -> None:
        self._compiled = compiled
        self._keeps_stop_tokens = keeps_stop_tokens

    def matcher(self, eos: tuple[int, ...]) -> XGrammarMatcher:
        from xgrammar import GrammarMatcher

        own, num_tokens = self._compiled.tokenizer_info.stop_token_ids, self._compiled.tokenizer_info.vocab_size
        eos = tuple(token for token in eos if 0 <= token < num_tokens)  # others never come
        stops = own if self._keeps_stop_tokens else [token for token in own if token in eos] or list(eos) or own
        return XGrammarMatcher(GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None), bool(stops),
                               -(-num_tokens // 32))


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
        self.is_over = self.inner.is_terminated() if self._has_stops else self._is_at_end()
        return True

    def fill(self, words: torch.Tensor) -> None:
        self.inner.fill_next_token_bitmask(words[None])

    def fork(self) -> XGrammarMatcher:
        """Another one, at the same place."""
        copy = XGrammarMatcher(self.inner.fork(), self._has_stops, self._num_words)
        copy.is_over = self.is_over
        return copy

    def _is_at_end(self) -> bool:
        words = torch.empty(self._num_words, dtype=torch.int32, device="cpu")
        self.fill(words)
        return not words.any()


class _Compiler(NamedTuple):
    """xgrammar's TokenizerInfo of a vocabulary, and its GrammarCompiler."""

    info: Any
    compiler: Any


class Grammars:
    """Compiles forms of outputs, for the last tokenizer that was given.

    Args:
        num_logits: of a token: masks have as many bits.
    """

    def __init__(self, num_logits: int) -> None:
        self._num_logits = num_logits
        self._made: tuple[tuple, Any, _Compiler] | None = None  # of the tokenizer with these traits
        self._shared: tuple[str, _Compiler] | None = None  # of another rank's vocabulary

    def compile(self, structured: Structured, tokenizer: Any) -> XGrammar:
        """The grammar of a form; equal forms are compiled once, as long as there is room.

        Raises:
            ImportError: xgrammar is not installed.
            ValueError: there is no tokenizer, or xgrammar cannot make a grammar of this.
        """
        compiler = self._of(tokenizer).compiler
        kind, text, any_whitespace = structured
        try:
            if kind == "json_schema":
                compiled = compiler.compile_json_schema(text, any_whitespace=any_whitespace)
            elif kind == "regex":
                compiled = compiler.compile_regex(text)
            elif kind == STRUCTURAL_TAG:
                compiled = compiler.compile_structural_tag(text)
            else:
                compiled = compiler.compile_grammar(text if kind == "grammar" else choices_as_grammar(json.loads(text)))
        except Exception as error:  # RuntimeError of its C++, and what its Python raises before
            raise ValueError(f"structured={{{kind!r}: {text!r:.200}}}: {_said(error)}; expected what xgrammar can make "
                             "a grammar of") from error
        return XGrammar(compiled)

    def vocabulary(self, tokenizer: Any) -> str:
        """What other ranks need of the tokenizer (`share`)."""
        return self._of(tokenizer).info.serialize_json()

    def share(self, vocabulary: str) -> None:
        """Compile for this vocabulary where no tokenizer is given."""
        xgrammar = import_xgrammar()
        if self._shared is None or self._shared[0] != vocabulary:
            self._shared = vocabulary, _compiler_of(xgrammar, xgrammar.TokenizerInfo.deserialize_json(vocabulary))

    def has_shared(self, vocabulary: str) -> bool:
        """Was `share` called with this one last?"""
        return self._shared is not None and self._shared[0] == vocabulary

    def _of(self, tokenizer: Any) -> _Compiler:
        xgrammar = import_xgrammar()
        if tokenizer is None:
            if self._shared is None:
                raise ValueError("structured: expected an engine with a tokenizer, by which a grammar's texts become "
                                 "tokens; give tokenizer= to PagedGenerator or model.generate")
            return self._shared[1]
        traits, made = tokenizer_traits(tokenizer), self._made
        if made is None or made[0] != traits:
            try:
                info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._num_logits)
            except Exception as error:
                raise ValueError(f"structured: xgrammar cannot read this {type(tokenizer).__name__} ({_said(error)}); "
                                 "expected a tokenizer of transformers") from error
            made = self._made = traits, tokenizer, _compiler_of(xgrammar, info)
        return made[2]


def import_xgrammar() -> Any:
    """The package, or an ImportError that says what to install."""
    require("structured", "structured output")
    import xgrammar

    return xgrammar


def _compiler_of(xgrammar: Any, info: Any) -> _Compiler:
    limits = {"max_threads": THREADS, "cache_limit_bytes": _CACHED_BYTES}
    return _Compiler(info, xgrammar.GrammarCompiler(info, **limits))


def _said(error: Exception) -> str:
    """A message of xgrammar without its time and place in its C++."""
    text = " ".join(str(error).split())
    return text.partition(".cc:")[2].partition(": ")[2] or text
