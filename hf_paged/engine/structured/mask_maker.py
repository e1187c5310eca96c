"""Bit masks of the tokens that may follow in rows under grammars, made on the host, also in another thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hf_paged.device.cuda import num_cores
from hf_paged.engine.structured.grammars import import_xgrammar
from hf_paged.engine.structured.matchers import Matcher, XGrammarMatcher
from hf_paged.sampling.token_mask import HostMasks

THREADS = max(1, min(12, num_cores() * 3 // 4))  # of xgrammar: more take longer to start than they save
_FEWEST_IN_THREADS = 4  # rows: fewer are filled in less time than threads take to start


class MaskMaker:
    """The maker of matchers' masks, in a buffer on the host from which they are copied to the device.

    There is one buffer, so that a copy has to be done before the next masks are made. This holds since the host waits
    for the tokens of a step before it makes the masks of the next one.
    """

    def __init__(self, num_logits: int, device: torch.device) -> None:
        self._num_words = -(-num_logits // 32)
        self._is_pinned = device.type == "cuda"
        self._buffer: torch.Tensor | None = None  # [lines, W]
        self._batch: Any = None  # an xgrammar.BatchGrammarMatcher
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        _makers.add(self)

    def make(self, matchers: Sequence[Matcher | None]) -> HostMasks:
        """Return masks of R rows, some of which have a matcher; valid until the next masks are begun.

        Raises:
            RuntimeError: a matcher raised it.
        """
        masks, given = self._laid_out(matchers)
        self._fill(given, masks.words)
        return masks

    def begin(self, matchers: Sequence[Matcher | None]) -> Callable[[], HostMasks]:
        """Start `make` in a thread, which holds the GIL only briefly; returns a function that waits for the result.

        Until that function returns, no other code may use the matchers. Both raise as `make`.
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
        begun.acquire()  # waits until the thread runs: it would otherwise start only when this one releases the GIL

        def end() -> HostMasks:
            job.result()
            return masks

        return end

    def wait(self) -> None:
        """Wait for masks that are being made; an exception is raised by the function that `begin` returned."""
        if self._job is not None:
            self._job.exception()

    def _laid_out(self, matchers: Sequence[Matcher | None]) -> tuple[HostMasks, list[Matcher]]:
        """Return a buffer for the masks, and the matchers that fill its lines."""
        self.wait()  # after an interrupt the thread may still write to the buffer
        given = [matcher for matcher in matchers if matcher is not None]
        lines = np.full(len(matchers), -1, np.int32)
        lines[[row for row, matcher in enumerate(matchers) if matcher is not None]] = np.arange(len(given))
        if self._buffer is None or len(self._buffer) < len(given):
            size = max(16, 1 << (len(given) - 1).bit_length())
            self._buffer = torch.empty(size, self._num_words, dtype=torch.int32, device="cpu",
                                       pin_memory=self._is_pinned)
        return HostMasks(self._buffer[: len(given)], lines), given

    def _fill(self, given: list[Matcher], words: torch.Tensor) -> None:
        is_batch = sum(type(matcher) is XGrammarMatcher for matcher in given) >= _FEWEST_IN_THREADS
        if is_batch:
            self._fill_batch(given, words)
        for i, matcher in enumerate(given):
            if not is_batch or type(matcher) is not XGrammarMatcher:
                matcher.fill(words[i])

    def _fill_batch(self, given: list[Matcher], words: torch.Tensor, begun: threading.Lock | None = None) -> None:
        """Fill the lines of xgrammar's matchers, in threads of xgrammar."""
        if begun is not None:
            begun.release()
        if self._batch is None:
            self._batch = import_xgrammar().BatchGrammarMatcher(max_threads=THREADS)
        lines = [i for i, matcher in enumerate(given) if type(matcher) is XGrammarMatcher]
        inner = [given[i].inner for i in lines]  # type: ignore[attr-defined]
        self._batch.batch_fill_next_token_bitmask(inner, words, lines)


_makers: weakref.WeakSet[MaskMaker] = weakref.WeakSet()


def wait_for_all() -> None:
    """Wait for all threads before a fork, which would copy matchers in the middle of a change, but not the thread."""
    for maker in list(_makers):
        maker.wait()


def forget_threads() -> None:
    """Forget the parent's threads in the child of a fork, which starts new ones when it needs them."""
    for maker in list(_makers):
        maker._thread = None
