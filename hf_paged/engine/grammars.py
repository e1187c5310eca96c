"""Grammars of structured output: compiled by xgrammar for a tokenizer, followed token by token, and as bit masks."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hf_paged import at_fork
from hf_paged.engine.stopping import tokenizer_traits
from hf_paged.options.structured import STRUCTURAL_TAG, Structured, choices_as_grammar
from hf_paged.sampling.token_mask import HostMasks

_CACHED_BYTES = 256 << 20  # of compiled grammars, per tokenizer
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
_THREADS = max(1, min(12, _CORES * 3 // 4))  # more take longer to start than they save
_FEWEST_IN_THREADS = 4  # rows: fewer are filled before threads have started
INSTALL = "Install it with `pip install hf-paged[structured]`, or `pip install xgrammar`."


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
    try:
        import xgrammar
    except ImportError as error:
        raise ImportError(f"structured output needs the package xgrammar ({error}). {INSTALL}") from error
    return xgrammar


def _compiler_of(xgrammar: Any, info: Any) -> _Compiler:
    limits = {"max_threads": _THREADS, "cache_limit_bytes": _CACHED_BYTES}
    return _Compiler(info, xgrammar.GrammarCompiler(info, **limits))


def _said(error: Exception) -> str:
    """A message of xgrammar without its time and place in its C++."""
    text = " ".join(str(error).split())
    return text.partition(".cc:")[2].partition(": ")[2] or text


class MaskMaker:
    """Makes masks of matchers on the host, in memory from which they are sent to the device.

    There is one buffer: masks have to be on the device, and the host has to know it, before the next ones are made.
    The host waits for a step's tokens before it makes the masks of the next step, and that is enough.
    """

    def __init__(self, num_logits: int, device: torch.device) -> None:
        self._num_words = -(-num_logits // 32)
        self._is_pinned = device.type == "cuda"
        self._buffer: torch.Tensor | None = None  # [lines, W]
        self._batch: Any = None  # an xgrammar.BatchGrammarMatcher
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        at_fork.register(self)
        _makers.add(self)

    def make(self, matchers: Sequence[Matcher | None]) -> HostMasks:
        """Masks of R rows, some of which have a matcher. They are good until the next ones are begun.

        Raises:
            RuntimeError: of a matcher.
        """
        masks, given = self._laid_out(matchers)
        self._fill(given, masks.words)
        return masks

    def begin(self, matchers: Sequence[Matcher | None]) -> Callable[[], HostMasks]:
        """`make` in a thread, which holds Python's lock for a moment only; what is returned waits for the end.

        Until then nobody may use the matchers. Raises as `make`, here or there.
        """
        masks, given = self._laid_out(matchers)
        others = [i for i, matcher in enumerate(given) if type(matcher) is not XGrammarMatcher]
        if len(given) - len(others) < _FEWEST_IN_THREADS:
            self._fill(given, masks.words)
            return lambda: masks
        for i in others:
            given[i].fill(masks.words[i])
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_paged-masks")
        begun = threading.Lock()
        begun.acquire()
        job = self._job = self._thread.submit(self._fill_batch, given, masks.words, begun)
        begun.acquire()  # else the thread would wait until this one lets go of Python's lock, as late as that may be

        def end() -> HostMasks:
            job.result()
            return masks

        return end

    def wait(self) -> None:
        """Until nothing is being made; what raises does so where it is waited for in the end."""
        if self._job is not None:
            self._job.exception()

    def after_fork_in_child(self) -> None:
        """The thread is the parent's."""
        self._thread = None

    def _laid_out(self, matchers: Sequence[Matcher | None]) -> tuple[HostMasks, list[Matcher]]:
        """Room for the masks, and the matchers that are to fill its lines."""
        self.wait()  # after an interrupt something may still write to the buffer
        given = [matcher for matcher in matchers if matcher is not None]
        lines = np.full(len(matchers), -1, np.int32)
        lines[[row for row, matcher in enumerate(matchers) if matcher is not None]] = np.arange(len(given))
        return HostMasks(self._words(len(given)), lines), given

    def _fill(self, given: list[Matcher], words: torch.Tensor) -> None:
        is_batch = sum(type(matcher) is XGrammarMatcher for matcher in given) >= _FEWEST_IN_THREADS
        if is_batch:
            self._fill_batch(given, words)
        for i, matcher in enumerate(given):
            if not is_batch or type(matcher) is not XGrammarMatcher:
                matcher.fill(words[i])

    def _fill_batch(self, given: list[Matcher], words: torch.Tensor, begun: threading.Lock | None = None) -> None:
        """Fill the lines of those of xgrammar in its threads."""
        if begun is not None:
            begun.release()
        if self._batch is None:
            self._batch = import_xgrammar().BatchGrammarMatcher(max_threads=_THREADS)
        lines = [i for i, matcher in enumerate(given) if type(matcher) is XGrammarMatcher]
        inner = [given[i].inner for i in lines]  # type: ignore[attr-defined]
        self._batch.batch_fill_next_token_bitmask(inner, words, lines)

    def _words(self, count: int) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < count:
            lines = max(16, 1 << (count - 1).bit_length())
            self._buffer = torch.empty(lines, self._num_words, dtype=torch.int32, device="cpu",
                                       pin_memory=self._is_pinned)
        return self._buffer[:count]


_makers: weakref.WeakSet[MaskMaker] = weakref.WeakSet()


@at_fork.before
def _wait_for_makers() -> None:
    """A child would have matchers that a thread, which it has not, is in the middle of."""
    for maker in list(_makers):
        maker.wait()
