"""Kernels that a piece of work launches and that are not compiled yet are compiled at once, in threads.

Nobody lists them: the work is run twice. The first run is a dry one, which launches none of hf_paged's kernels and
notes for which Triton has no code yet. Triton's compiler holds Python's lock only while it parses.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

try:
    from triton import knobs
    from triton.runtime.jit import JITFunction
except ImportError:
    knobs, JITFunction = None, object

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_MOST_THREADS = 16
_PROGRESS_DELAY_S = 2.0
# What lies in Triton's cache on the disk is in memory within this time: only a longer wait is worth a look ahead.
_PATIENCE_S = 0.5
_POLL_S = 0.2
_ALLOCATIONS = frozenset({
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
})


class _Missing(BaseException):
    """A kernel is not compiled. No `Exception`: the code that it passes through is not to answer it."""


class _Notes:
    """Of the kernels that were missed, what is on its way. None of them is waited for here."""

    def __init__(self) -> None:
        self.futures: dict[Future[None], None] = {}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.pool = ThreadPoolExecutor(min(cores, _MOST_THREADS), thread_name_prefix="hf_paged-compile")

    def add(self, kernel: Any, key: str, device: int, specialization: str) -> None:
        place = id(kernel), key, device
        with _lock:
            future = _under_way.get(place)
            if future is None:
                future = _under_way[place] = self.pool.submit(_compile, kernel, specialization, place)
        self.futures[future] = None


class _Thread(threading.local):
    """What Triton's hook is to do in this thread: raise `_Missing`, or take a note in a dry run, or nothing."""

    watches = False
    notes: _Notes | None = None


_thread = _Thread()
_under_way: dict[tuple[int, str, int], Future[None]] = {}  # by kernel, Triton's key of the variant, and device
_lock = threading.Lock()


class Kernel(JITFunction):
    """A function that Triton compiles. It is read at its first use, so that what nobody uses costs nothing."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self._read = partial(super().__init__, fn, **options)
        self._reading = threading.RLock()
        self._is_read = False

    def __getattr__(self, name: str) -> Any:
        """Whatever is missing yet is what Triton's own `__init__` sets."""
        if not name.startswith("_is_read"):
            with self._reading:
                if not self._is_read:
                    self._is_read = True
                    self._read()
                    return getattr(self, name)
                if name in self.__dict__:  # another thread has read it meanwhile
                    return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, grid: Any) -> Any:
        if _thread.notes is not None:
            return partial(self.run, grid=grid, warmup=True)
        return super().__getitem__(grid)


def compiled_together(run: Callable[[], Result], later: Iterable[Callable[[], object]] = ()) -> Result:
    """``run()``, whose kernels are compiled before, side by side, as far as they are not.

    Where a kernel is missing, `run` is called three times: until the first one is missed, dry, and at last as it should
    be. So it has to come to the same if it is repeated, and must neither wait for the device nor for other ranks. In
    the dry run tensors begin as zeros in place of memory as it comes, so that what a kernel did not write is a valid
    index. A kernel that does not compile is left to its launch, which raises what there is to raise. Inside of another
    such call it is just ``run()``.

    Args:
        later: what will be launched soon. It is run dry, one after the other, as long as `run` has to wait; what it
            misses is compiled in the background.
    """
    if _thread.watches or _thread.notes is not None or not _is_told():
        return run()
    _thread.watches = True
    try:
        return run()
    except _Missing:
        pass
    finally:
        _thread.watches = False
    notes = _Notes()
    try:
        _dry(run, notes)
        _wait_for(list(notes.futures), (partial(_dry, further, notes) for further in later))
    finally:
        notes.pool.shutdown(wait=False)
    return run()


def is_dry() -> bool:
    """Is this thread in a dry run?"""
    return _thread.notes is not None


def in_background(prepare: Callable[[], object]) -> Future[object]:
    """`prepare()` in a thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="hf_paged-compile")
    future = pool.submit(prepare)
    pool.shutdown(wait=False)
    return future


@lru_cache(maxsize=1)
def begin_early() -> Future[object]:
    """What Triton does once in a process before the first kernel, in a thread: it hashes its own files (0.4 s).

    Threads that come to it at the same time would all do it.
    """
    return in_background(_hash_triton)


def _hash_triton() -> None:
    with suppress(Exception):  # another version's, or without Triton: whoever needs it, does it
        from triton.runtime.cache import triton_key

        triton_key()


def _is_told() -> bool:
    """Does Triton tell us what it is about to compile? Not where it is missing, or tells somebody else."""
    if knobs is None:
        return False
    if knobs.runtime.jit_cache_hook is None:
        knobs.runtime.jit_cache_hook = _before_compiling
    return knobs.runtime.jit_cache_hook is _before_compiling


def _before_compiling(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
    """Triton's hook; True keeps it from compiling, and from the launch."""
    if not isinstance(fn.jit_function, Kernel):  # others' tuners would compare times of launches that are none
        return False
    if _thread.watches:
        raise _Missing
    if _thread.notes is None:
        return False
    _thread.notes.add(fn.jit_function, key, int(compile["device"]), compile["specialization_data"])
    return True


def _compile(kernel: Any, specialization: str, place: tuple[int, str, int]) -> None:
    """Bring a variant into memory, from Triton's cache on the disk or by its compiler."""
    try:
        wait([begin_early()])
        with torch.cuda.device(place[2]):
            kernel.preload(specialization)
    except Exception as error:
        logger.info("hf_paged: %s is compiled at its first launch: %r", kernel.__name__, error)
    finally:
        with _lock:
            _under_way.pop(place, None)


def _dry(run: Callable[[], object], notes: _Notes) -> None:
    with suppress(Exception), _Zeros(), _noting(notes):  # the real run is the one to fail
        run()


@contextmanager
def _noting(notes: _Notes) -> Iterator[None]:
    _thread.notes = notes
    try:
        yield
    finally:
        _thread.notes = None


class _Zeros(TorchDispatchMode):
    """New tensors begin as zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATIONS else made


def _wait_for(futures: list[Future[None]], later: Iterator[Callable[[], object]]) -> None:
    """Until all are done; with a line of progress where that takes long."""
    began, patience, bar = time.monotonic(), _PATIENCE_S, None
    while left := wait(futures, timeout=patience).not_done:
        further = next(later, None)
        patience = _POLL_S
        if further is not None:
            further()
            patience = 0.0
        if bar is None and time.monotonic() - began >= _PROGRESS_DELAY_S:
            bar = tqdm(total=len(futures), desc="hf_paged: compiling kernels", unit="kernel", leave=False)
        if bar is not None and (more := len(futures) - len(left) - bar.n):
            bar.update(more)
    if bar is not None:
        bar.close()
