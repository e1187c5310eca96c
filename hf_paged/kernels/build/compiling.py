"""Parallel compilation, in threads, of the kernels that a piece of work is about to launch.

No list of kernels is needed: the work is run twice. The first run is a dry one, which launches none of hf_paged's
kernels and notes which are not compiled yet. Triton's compiler holds the GIL only while it parses.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from hf_paged.device.cuda import num_cores
from hf_paged.kernels.build.compile_process import compile_elsewhere
from hf_paged.process_lock import once_a_process

try:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ImportError:
    driver, JITFunction = None, object
try:
    from triton.runtime._async_compile import FutureKernel, active_mode
except ImportError:  # an older Triton, or none: every kernel is compiled at its first launch
    FutureKernel = active_mode = None

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
    """A signal that a kernel is not compiled. Not an `Exception`, so that no code on its way catches it.

    Its argument, if it has one, is the future of the kernel's compilation.
    """


class _Watch:
    """A run that launches kernels up to the first one that is not compiled."""

    def submit(self, *_: Any) -> Any:
        raise _Missing


class _DryRun:
    """A run that launches nothing; kernels that are not compiled go to threads and, as `FutureKernel`, to `pending`."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(min(num_cores(), _MOST_THREADS), thread_name_prefix="hf_paged-compile")
        self.pending: dict[Any, Any] = {}  # the kernel of each FutureKernel, which may be compiled already

    def run(self, work: Callable[[], object]) -> None:
        with _dry(self), suppress(Exception), _Zeros():  # an error will be raised by the real run
            work()

    def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        with _told(self):
            found = kernel.run(*args, grid=grid, warmup=True, **options)
        if isinstance(found, FutureKernel):
            self.pending[found] = kernel

    def submit(self, key: str, compile: Callable[[], Any], *at_end: Callable[..., Any]) -> Any:
        place = driver.active.get_current_device(), key  # a compiled kernel is loaded to one device
        with _lock:
            if (variant := _under_way.get(place)) is None:
                future = self.pool.submit(lambda: with_launcher(compile()))
                variant = _under_way[place] = FutureKernel(*at_end, future)
                future.add_done_callback(lambda _: _arrived(place))
            return variant

    def settle(self, found: Iterable[Any]) -> None:
        """Put the compiled kernels in their places. One that failed is compiled again at its launch, which raises."""
        for variant in found:
            kernel, compiled = self.pending[variant], None
            try:
                with _lock:
                    compiled = variant.result()
            except Exception as error:
                logger.info("hf_paged: %s is compiled at its first launch: %r", kernel.__name__, error)
            for variants, *_ in list(kernel.device_caches.values()):
                for key in [key for key, value in list(variants.items()) if value is variant]:
                    if compiled is None:
                        del variants[key]
                    else:
                        variants[key] = compiled


class _Ahead:
    """A run that launches nothing and loads kernels from disk; `_Missing` has the future of one that is compiled."""

    def __init__(self) -> None:
        self._name = ""

    def run(self, work: Callable[[], object]) -> None:
        with _dry(self):
            work()

    def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        self._name = kernel.__name__
        with _told(self):
            kernel.run(*args, grid=grid, warmup=True, **options)

    def submit(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], object], *_: Any) -> Any:
        if not _lies_on_disk(key, self._name):
            raise _Missing(_begin_ahead(key, compile, finalize))
        kernel = compile()
        finalize(kernel)
        return kernel


def _begin_ahead(key: str, compile: Callable[[], Any], finalize: Callable[[Any], object]) -> Future[object]:
    """The future of a kernel, which holds nothing of the work that it is for."""
    place = driver.active.get_current_device(), key
    with _lock:
        if (future := _ahead.get(place)) is None:
            future = Future()
            threading.Thread(target=_compile_ahead, args=(future, compile, finalize), daemon=True,
                             name="hf_paged-compile_ahead").start()
            _ahead[place] = future
            future.add_done_callback(lambda _: _ahead.pop(place, None))
        return future


def _compile_ahead(future: Future[object], compile: Callable[[], Any], finalize: Callable[[Any], object]) -> None:
    with suppress(Exception):  # then this thread does it
        compile_elsewhere(compile)
    try:
        finalize(with_launcher(compile()))
    except BaseException as error:
        future.set_exception(error.with_traceback(None))
    else:
        future.set_result(None)


def with_launcher(kernel: Any) -> Any:
    """A compiled kernel, once Triton's cache on the disk has what launches it.

    In 3.6 that is a module for each signature, which a C compiler makes at the first launch (0.2 s). Triton's own code
    makes it here, but does not load it: all these modules have one name, so that of two threads that load one each, one
    may get the other's functions.
    """
    with suppress(Exception):  # the launch says what there is to say; another version makes it otherwise, or not at all
        initialize = driver.active.launcher_cls.__init__
        make = initialize.__globals__["compile_module_from_src"]
        if "_load_module_from_path" in make.__code__.co_names:
            make = _with_globals(make, _load_module_from_path=lambda name, path: None)
            _with_globals(initialize, compile_module_from_src=make)(SimpleNamespace(), kernel.src, kernel.metadata)
    return kernel


def _with_globals(function: Any, **names: Any) -> Any:
    """The same function, but for what its module calls so."""
    return FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__,
                        function.__closure__)


def _lies_on_disk(key: str, name: str) -> bool:
    """Has Triton's cache on the disk the kernel of this key? Its compiler then finds it there within milliseconds."""
    with suppress(Exception):  # another version's cache: then it is compiled, or found, in a thread
        from triton.runtime.cache import get_cache_manager

        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(folder.get_group(f"{name[:150]}.json"))  # so much of the name stands in the file's
    return False


# By device and Triton's key: not every version keeps a `FutureKernel` before it is there.
_under_way: dict[tuple[int, str], Any] = {}
_ahead: dict[tuple[int, str], Future[object]] = {}
_lock = threading.RLock()


def _arrived(place: tuple[int, str]) -> None:
    with _lock, suppress(Exception):  # `settle` says what there is to say of an error
        _under_way.pop(place).result()


class _Thread(threading.local):
    dry_run: _DryRun | _Ahead | None = None


_thread = _Thread()


@contextmanager
def _dry(mode: _DryRun | _Ahead) -> Iterator[None]:
    """What this thread launches in here goes to `mode`."""
    _thread.dry_run = mode
    try:
        yield
    finally:
        _thread.dry_run = None


@contextmanager
def _told(mode: _Watch | _DryRun | _Ahead) -> Iterator[None]:
    """In this thread Triton calls ``mode.submit`` for a kernel that is neither compiled nor under way."""
    before = active_mode.get()
    try:
        active_mode.set(mode)
        yield
    finally:  # also where an interrupt came before the mode was another
        active_mode.set(before)


class _Noted:
    """A kernel of Triton's that dry runs do not launch."""

    def __getitem__(self, grid: Any) -> Any:
        dry_run = _thread.dry_run
        return super().__getitem__(grid) if dry_run is None else partial(dry_run.launch, self, grid)  # type: ignore[misc]


def noted(kernel: Any) -> Any:
    """Make dry runs handle a kernel that another `jit` (Gluon's) has made, and return it."""
    kernel.__class__ = type(type(kernel).__name__, (_Noted, type(kernel)), {})
    return kernel


class Kernel(_Noted, JITFunction):
    """A function that Triton compiles. Its source is read at its first use, so that an unused kernel costs nothing."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self._read = partial(super().__init__, fn, **options)
        self._reading = threading.RLock()
        self._is_read = False

    def __getattr__(self, name: str) -> Any:
        """Run Triton's own `__init__`, which sets all attributes that are missing."""
        if not name.startswith("_is_read"):
            with self._reading:
                if not self._is_read:
                    self._is_read = True
                    self._read()
                    return getattr(self, name)
                if name in self.__dict__:  # another thread has run `__init__` while this one waited for the lock
                    return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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
    if is_dry() or active_mode is None or active_mode.get() is not None:
        return run()
    if not (early := prepare_triton()).done():
        wait([early])  # the first kernel that is missed would do it again
    try:
        with _told(_Watch()):
            return run()
    except _Missing:
        pass
    dry = _DryRun()
    try:
        dry.run(run)
        needed = list(dry.pending)
        under_way = [future for variant in needed if (future := variant.future) is not None]
        _wait_for(under_way, (partial(dry.run, further) for further in later))
    finally:
        dry.pool.shutdown(wait=False)
    dry.settle(needed)
    return run()


def compiled_ahead(run: Callable[[], object]) -> Future[object]:
    """Have the first kernel of ``run()`` that is not there compiled by another process, and wait for nothing.

    `run` is called dry. What is compiled already, or lies in Triton's cache on the disk, is loaded at once. Done: the
    kernel is there, or has the error of its compiler; if it was the only one that `run` launches, a launch finds all. A
    program that ends does not wait either.
    """
    found: Future[object] = Future()
    if active_mode is None:
        found.set_exception(NotImplementedError("this version of triton does not compile asynchronously"))
        return found
    try:
        _Ahead().run(run)
    except _Missing as missing:
        future: Future[object] = missing.args[0]
        return future
    except Exception as error:
        found.set_exception(error.with_traceback(None))
    else:
        found.set_result(None)
    return found


def is_dry() -> bool:
    """Is this thread in a dry run?"""
    return _thread.dry_run is not None


def in_background(prepare: Callable[[], object]) -> Future[object]:
    """`prepare()` in a thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="hf_paged-compile")
    future = pool.submit(prepare)
    pool.shutdown(wait=False)
    return future


@once_a_process
def prepare_triton() -> Future[object]:
    """Have Triton hash its own files (0.4 s), in a thread, which it does once a process before its first kernel.

    Without this, threads that compile at the same time would all hash them.
    """
    return in_background(_hash_triton)


def _hash_triton() -> None:
    with suppress(Exception):  # without Triton, or with another version, which hashes its files when it needs them
        from triton.runtime.cache import triton_key

        triton_key()


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
