"""Grammars of structured output, compiled by xgrammar for a tokenizer."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hf_paged.config import PagedConfig
from hf_paged.engine.structured.form_compiler import compile_form, said
from hf_paged.engine.structured.form_compilers import COMPILERS, Vocabulary
from hf_paged.engine.structured.matchers import XGrammar
from hf_paged.engine.text import tokenizer_traits
from hf_paged.optional import require
from hf_paged.options.structured import FormError, Structured, check_size
from hf_paged.process_lock import ProcessLock

_REFUSED_S, _MOST_REFUSED = 60.0, 100  # seconds for which the error of a refused form is cached, and the most forms
_CACHED_BYTES = 256 << 20  # compiled grammars that an engine keeps
NO_TOKENIZER = ("structured: expected an engine with a tokenizer, by which a grammar's texts become tokens; give "
                "tokenizer= to PagedGenerator or model.generate")
_EXPECTED = "expected what xgrammar can make a grammar of"


class _Key(NamedTuple):
    """The cache key of a compiled form: the number of its vocabulary, and the form."""

    vocabulary: int
    structured: Structured


class _Compilation:
    """A form that is being compiled, and the futures of its callers.

    Attributes:
        number: the job's number in `FormCompilers`; None before it has one, or if this process compiles the form.
        was_lost: a compiling process has ended without an answer once; the form is not compiled in this process then.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.waiters: list[Future[XGrammar]] = []
        self.number: int | None = None
        self.was_lost = False


class Grammars:
    """A cache of compiled forms of outputs, for the last tokenizer that was given. Thread-safe.

    Each form is compiled once, in a process of its own, for all callers that need it at the same time, and is kept
    while there is room (least recently used ones go first). A form that is kept waits for no other compilation.

    Args:
        num_logits: number of logits of a token, and of bits of a mask.
        config: has the limits of forms.
    """

    def __init__(self, num_logits: int, config: PagedConfig) -> None:
        self._num_logits = num_logits
        self._config = config
        self._lock = ProcessLock()
        self._reading = ProcessLock()  # held while a vocabulary is read, which takes long: two threads read it once
        self._made: tuple[tuple, Any, Vocabulary] | None = None  # traits of a tokenizer, the tokenizer, its vocabulary
        self._shared: tuple[str, Vocabulary] | None = None  # a vocabulary of another rank, as it was sent and as read
        self._known: OrderedDict[_Key, XGrammar] = OrderedDict()  # in order of use
        self._refused: OrderedDict[_Key, tuple[str, float]] = OrderedDict()  # reason, and `time.monotonic`
        self._open: dict[_Key, _Compilation] = {}

    def compile(self, structured: Structured, tokenizer: Any) -> XGrammar:
        """Return the grammar of a form, and wait for its compilation.

        Raises:
            ImportError: xgrammar is not installed.
            FormError: xgrammar cannot make a grammar of the form; no text has the form, or the vocabulary cannot
                produce one; a limit of the config is reached.
            ValueError: there is no tokenizer, or xgrammar cannot read it.
        """
        if tokenizer is None:  # another rank has compiled this form within its limits: this rank needs none
            vocabulary = self._of(None)
            key = _Key(vocabulary.number, structured)
            if (known := self._known.get(key)) is None:
                known = self._grammar(structured, vocabulary)
                self._keep(key, known)
            return known
        waiter = self.begin(structured, tokenizer)
        try:
            return waiter.result()
        except BaseException:
            waiter.cancel()
            raise

    def begin(self, structured: Structured, tokenizer: Any) -> Future[XGrammar]:
        """Start `compile`, and return a future, which may be cancelled; raises what needs no compilation."""
        check_size(structured, self._config.structured_max_bytes)
        vocabulary = self._of(tokenizer)
        key, waiter = _Key(vocabulary.number, structured), Future[XGrammar]()
        with self._lock.rlock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                waiter.set_result(known)
                return waiter
            if (refused := self._refused.get(key)) is not None and time.monotonic() - refused[1] < _REFUSED_S:
                waiter.set_exception(FormError(structured, refused[0]))
                return waiter
            compilation = self._open.get(key)
            if compilation is None:
                compilation = _Compilation(vocabulary)
                self._start(key, compilation)
                self._open[key] = compilation  # after `_start`: if that raises, equal forms must not wait for ever
            compilation.waiters.append(waiter)
        waiter.add_done_callback(partial(self._leave, key, compilation))
        return waiter

    def vocabulary(self, tokenizer: Any) -> str:
        """Return the tokenizer's vocabulary in a form that other ranks can read (`share`)."""
        vocabulary = self._of(tokenizer)
        return json.dumps([sorted(vocabulary.special), vocabulary.serialized()])

    def share(self, vocabulary: str) -> None:
        """Use this vocabulary for `compile` without a tokenizer."""
        xgrammar = import_xgrammar()
        if self._shared is None or self._shared[0] != vocabulary:
            special, serialized = json.loads(vocabulary)
            info = xgrammar.TokenizerInfo.deserialize_json(serialized)
            self._shared = vocabulary, Vocabulary(xgrammar, info, frozenset(special))
            self._drop_others()

    def has_shared(self, vocabulary: str) -> bool:
        """Return whether the last call of `share` had this vocabulary."""
        return self._shared is not None and self._shared[0] == vocabulary

    def forget_open(self) -> None:
        """Forget running compilations in the child of a fork, which lacks the threads that wait for and answer them."""
        self._open = {}

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, key: _Key, compilation: _Compilation) -> None:
        answer = partial(self._answer, key, compilation)
        seconds = self._config.structured_max_seconds
        try:
            compilation.number = COMPILERS.compile(compilation.vocabulary, key.structured, seconds, answer)
        except OSError as error:
            answer("none", error)

    def _answer(self, key: _Key, compilation: _Compilation, what: str, more: Any) -> None:
        if what == "lost" and not compilation.was_lost:
            compilation.was_lost = True
            with self._lock.rlock:
                if self._open.get(key) is compilation:  # else all callers have cancelled
                    self._start(key, compilation)
        elif what in ("quick", "compiled") or (what == "none" and not compilation.was_lost):
            COMPILERS.in_thread(self._finish, key, compilation, more if what == "compiled" else None)
        else:
            self._settle(key, compilation, None, self._why(what, more), is_lasting=what in ("refused", "broke", "late"))

    def _why(self, what: str, more: Any) -> str:
        if what in ("lost", "none"):  # for the second time: `was_lost` is set
            what, more = "failed", f"the process that compiles grammars ended twice ({more})"
        limit = f"structured_max_seconds={self._config.structured_max_seconds:g}"
        return {"refused": f"{more}; {_EXPECTED}", "broke": f"compiling it failed: {more}; expected a smaller form",
                "failed": f"compiling it failed: {more}; expected a system that can start processes and threads",
                "late": f"compiling it took more than {limit} (PagedConfig); expected a form that is compiled within "
                        "that time"}[what]

    def _finish(self, key: _Key, compilation: _Compilation, serialized: str | None) -> None:
        """Make the grammar of a form that compiles fast, or that another process has compiled; runs in a thread."""
        try:
            grammar = self._grammar(key.structured, compilation.vocabulary, serialized)
        except Exception as error:
            self._settle(key, compilation, None, error.why if isinstance(error, FormError) else said(error))
        else:
            self._settle(key, compilation, grammar, "")

    def _grammar(self, structured: Structured, vocabulary: Vocabulary, serialized: str | None = None) -> XGrammar:
        xgrammar = import_xgrammar()
        try:
            if serialized is None:
                compiled = compile_form(xgrammar, vocabulary.compiler, structured)
            else:
                compiled = xgrammar.CompiledGrammar.deserialize_json(serialized, vocabulary.info)
        except Exception as error:  # RuntimeError of xgrammar's C++, and any error of its Python code
            raise FormError(structured, f"{said(error)}; {_EXPECTED}") from error
        grammar = XGrammar(compiled, special=vocabulary.special)
        if not grammar.may_begin():
            raise FormError(structured, "no token of the vocabulary can begin it; expected a form whose texts the "
                                        "tokenizer can make")
        return grammar

    def _settle(self, key: _Key, compilation: _Compilation, grammar: XGrammar | None, why: str, *,
                is_lasting: bool = True) -> None:
        """Resolve the futures of all callers with the grammar, or with a `FormError`.

        Args:
            is_lasting: another try would fail alike, so that the error is cached.
        """
        with self._lock.rlock:
            if self._open.get(key) is compilation:
                del self._open[key]
            if grammar is not None:
                self._keep(key, grammar)
            elif is_lasting:
                self._refused[key] = why, time.monotonic()
                self._refused.move_to_end(key)
                if len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)
        for waiter in compilation.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if grammar is not None:
                waiter.set_result(grammar)
            else:
                waiter.set_exception(FormError(key.structured, why))

    def _keep(self, key: _Key, grammar: XGrammar) -> None:
        with self._lock.rlock:
            if key.vocabulary not in self._vocabularies():
                return
            self._known[key] = grammar
            while len(self._known) > 1 and sum(known.nbytes for known in self._known.values()) > _CACHED_BYTES:
                self._known.popitem(last=False)

    def _vocabularies(self) -> set[int]:
        """Return the numbers of the vocabularies that forms are compiled for now."""
        return {made[-1].number for made in (self._made, self._shared) if made is not None}

    def _drop_others(self) -> None:
        """Drop the cached forms of earlier vocabularies."""
        with self._lock.rlock:
            kept = self._vocabularies()
            for forms in (self._known, self._refused):
                for key in [key for key in forms if key.vocabulary not in kept]:
                    del forms[key]

    def _leave(self, key: _Key, compilation: _Compilation, waiter: Future[XGrammar]) -> None:
        """Cancel the compilation if its last caller has cancelled; called when a future is done."""
        with self._lock.rlock:
            if not waiter.cancelled() or self._open.get(key) is not compilation:
                return
            if all(other.cancelled() for other in compilation.waiters):
                del self._open[key]
                if compilation.number is not None:
                    COMPILERS.cancel(compilation.number)

    def _of(self, tokenizer: Any) -> Vocabulary:
        xgrammar = import_xgrammar()
        if tokenizer is None:
            if self._shared is None:
                raise ValueError(NO_TOKENIZER)
            return self._shared[1]
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        traits = tokenizer_traits(tokenizer), getattr(tokenizer, "eos_token_id", None), special
        with self._reading.rlock:
            made = self._made
            if made is None or made[0] != traits:
                made = self._made = traits, tokenizer, self._read(xgrammar, tokenizer, special)
                self._drop_others()
        return made[2]

    def _read(self, xgrammar: Any, tokenizer: Any, special: frozenset[int]) -> Vocabulary:
        with suppress(OSError):
            COMPILERS.start()  # in parallel with reading the tokenizer, since both take seconds
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._num_logits)
        except Exception as error:
            raise ValueError(f"structured: xgrammar cannot read this {type(tokenizer).__name__} ({said(error)}); "
                             "expected a tokenizer of transformers") from error
        return Vocabulary(xgrammar, info, special)


def import_xgrammar() -> Any:
    """Return the package xgrammar, or raise an ImportError that says what to install."""
    require("structured", "structured output")
    import xgrammar

    return xgrammar
