"""Log of the kernels that Triton compiles or loads for this process, and of the time that steps lose to that.

A step that waits for Triton's compiler, or for the capture of a CUDA graph, delays all requests that run. Each thread
counts the seconds that it waited; an engine reads them around a step (`StepDelays`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple

from hf_paged.process_lock import ProcessLock

logger = logging.getLogger(__name__)

AFTER_READY = "HF_PAGED_AFTER_READY"
POLICIES = ("warn", "error", "ignore")
_LATE_S = 0.05  # a step that took longer counts as delayed


class LateKernelError(RuntimeError):
    """A kernel was compiled for requests of an engine that was ready, which ``HF_PAGED_AFTER_READY=error`` forbids."""


class KernelCounts(NamedTuple):
    """Numbers of kernel variants that this process has compiled, and loaded from Triton's cache on the disk."""

    compiled: int
    loaded: int


class _Thread(threading.local):
    compiling = 0.0  # seconds that launches of this thread waited for kernels
    capturing = 0.0
    is_after_ready = False  # a kernel that this thread compiles delays requests of an engine that is ready
    is_on_disk = False  # Triton's answer for the kernel that it has just made


_thread = _Thread()
_lock = ProcessLock()
_counts = KernelCounts(0, 0)
_variants: dict[str, None] = {}  # records of variants, oldest first
_warned_of: set[str] = set()


def counts() -> KernelCounts:
    """Return the counts of this process."""
    return _counts


def variants() -> list[str]:
    """Return the records of the variants that this process needed, oldest first; see `variants.record_of`."""
    return list(_variants)


def note_variant(record: str) -> None:
    """Add the record of a variant that a launch, or a dry run, needs."""
    _variants[record] = None


def policy() -> str:
    """Return what happens when a kernel is compiled after an engine is ready.

    Raises:
        ValueError: the environment variable has another value.
    """
    found = os.environ.get(AFTER_READY) or POLICIES[0]
    if found not in POLICIES:
        raise ValueError(f"{AFTER_READY}={found!r}: expected one of {', '.join(POLICIES)}")
    return found


def noting(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's ``compile`` with a note in this log behind each call."""
    @wraps(compile)
    def compile_noted(src: Any, *args: Any, **options: Any) -> Any:
        global _counts
        _listen()
        _thread.is_on_disk = False
        began = time.perf_counter()
        kernel = compile(src, *args, **options)
        seconds, is_loaded = time.perf_counter() - began, _thread.is_on_disk
        _thread.compiling += seconds
        with _lock.rlock:
            _counts = KernelCounts(_counts.compiled + (not is_loaded), _counts.loaded + is_loaded)
        if _thread.is_after_ready and not is_loaded:
            _complain(src, seconds)
        return kernel

    return compile_noted


class _Listener:
    """Triton's listener of compilations, of which there is one; it passes events on to the one that was there."""

    before: Callable[..., Any] | None = None

    def __call__(self, **event: Any) -> None:
        _thread.is_on_disk = bool(event.get("cache_hit"))
        if self.before is not None:
            self.before(**event)


_listener: _Listener | None = None


def _listen() -> None:
    """Have Triton say whether a kernel was on the disk. Where a program replaces the listener, kernels count as
    compiled."""
    global _listener
    if _listener is None:
        _listener = _Listener()
        with suppress(ImportError, AttributeError):  # an older Triton
            from triton import knobs

            _listener.before, knobs.compilation.listener = knobs.compilation.listener, _listener


def _complain(source: Any, seconds: float) -> None:
    """Report a kernel that requests of a ready engine waited for, once, by the policy of the environment."""
    constants = {path if isinstance(path, str) else source.fn.arg_names[path[0]]: value
                 for path, value in source.constants.items() if isinstance(path, str) or len(path) == 1}
    key = ", ".join(f"{name}={constants.get(name, kind)}" for name, kind in source.signature.items())
    text = (f"hf_paged: requests waited {seconds:.1f} s for the kernel {source.fn.__name__}({key}), which was compiled "
            'after the engine was ready. Set warmup="full", or give warm_up(requests) a request with the same options.')
    if (chosen := policy()) == "error":
        raise LateKernelError(text)
    variant = f"{source.fn.__name__}({key})"
    if chosen == "warn" and variant not in _warned_of:
        _warned_of.add(variant)
        logger.warning("%s", text)


def is_after_ready() -> bool:
    """Return whether this thread runs a step of an engine that is ready."""
    return _thread.is_after_ready


def on_behalf(is_after_ready: bool, compile: Callable[[], Any]) -> Any:
    """Call ``compile`` in this thread for a launch of another one."""
    before, _thread.is_after_ready = _thread.is_after_ready, is_after_ready
    try:
        return compile()
    finally:
        _thread.is_after_ready = before


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block as one in which this thread waits for kernels."""
    began, before = time.perf_counter(), _thread.compiling
    try:
        yield
    finally:
        _thread.compiling = before + time.perf_counter() - began


@contextmanager
def capturing() -> Iterator[None]:
    """Count the time of the block as one in which this thread captures a CUDA graph."""
    began, before = time.perf_counter(), _thread.compiling
    try:
        yield
    finally:
        _thread.capturing += time.perf_counter() - began - (_thread.compiling - before)


class StepDelays:
    """What one engine's steps lost to compiling and capturing.

    Attributes:
        is_ready: the warm-up is done, and no kernel should be compiled any more.
        compile_seconds, capture_seconds: seconds that steps waited for kernels, and captured CUDA graphs.
        num_delayed: number of steps that did either and took more than 50 ms.
        longest: most seconds that a step lost.
    """

    def __init__(self) -> None:
        policy()
        self.is_ready = False
        self.compile_seconds = self.capture_seconds = self.longest = 0.0
        self.num_delayed = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the block as a step, which this thread runs."""
        compiling, capturing, began = _thread.compiling, _thread.capturing, time.perf_counter()
        outer, _thread.is_after_ready = _thread.is_after_ready, self.is_ready
        try:
            yield
        finally:
            _thread.is_after_ready = outer
            compiling, capturing = _thread.compiling - compiling, _thread.capturing - capturing
            if lost := compiling + capturing:
                self.compile_seconds += compiling
                self.capture_seconds += capturing
                self.num_delayed += time.perf_counter() - began > _LATE_S
                self.longest = max(self.longest, lost)
