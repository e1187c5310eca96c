"""Parallel compilation, in threads, of the kernels that a piece of work is about to launch.

No list of kernels is needed: the work is run twice. The first run is a dry one, which launches none of hf_paged's
kernels and collects those that are not compiled yet. Triton's compiler holds the GIL only while it parses.
"""

from __future__ import annotations

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
from hf_paged.kernels.build import kernel_log
from hf_paged.kernels.build.compile_process import cache_folder, compile_elsewhere, compile_once
from hf_paged.kernels.build.variants import launch_of, record_of
from hf_paged.process_lock import ProcessLock, once_a_process

try:
    from triton.runtime import driver
    from triton.runtime._async_compile import FutureKernel, active_mode
    from triton.runtime.jit import (  # the first: also functions that run while a kernel is compiled
        JITCallable,
        JITFunction,
    )
except ImportError:  # every kernel is compiled at its first launch
    driver = FutureKernel = active_mode = None
    JITCallable = JITFunction = object

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
    """A signal that a kernel is not compiled. Not an `Exception`, so that no code on its way catches it."""


class _Watch:
    """A run that launches kernels up to the first one that is not compiled."""

    def submit(self, *_: Any) -> Any:
        raise _Missing


class _LaunchesNothing:
    """Base of runs of work that launch none of its kernels; ``submit`` gets those that are not compiled."""

    is_complete = False

    def run(self, work: Callable[[], object]) -> None:
        """Call ``work``, whose launches in this thread come to `launch`."""
        _thread.dry_run = self
        try:
            work()
        finally:
            _thread.dry_run = None

    def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> Any:
        """Return what Triton would launch, loaded."""
        with _submits_to(self):
            return kernel.run(*args, grid=grid, warmup=True, **options)


class _DryRun(_LaunchesNothing):
    """A run whose kernels that are not compiled go to threads and, as `FutureKernel`, to `pending`.

    Args:
        is_complete: see `is_complete_dry_run`.
    """

    def __init__(self, *, is_complete: bool = False) -> None:
        self.is_complete = is_complete
        self.failed: list[str] = []  # names of kernels that do not compile
        self.pool = ThreadPoolExecutor(min(num_cores(), _MOST_THREADS), thread_name_prefix="hf_paged-compile")
        self.pending: dict[Any, Any] = {}  # the kernel of each FutureKernel, which may be compiled already
        self.is_after_ready = kernel_log.is_after_ready()  # until what is looked at will be launched later
        self.refused: kernel_log.LateKernelError | None = None

    def run(self, work: Callable[[], object]) -> None:
        with suppress(Exception), _Zeros():  # an error will be raised by the real run
            super().run(work)

    def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found = super().launch(kernel, grid, *args, **options)
        if isinstance(found, FutureKernel):
            self.pending[found] = kernel

    def submit(self, key: str, compile: Callable[[], Any], *at_end: Callable[..., Any]) -> Any:
        place = driver.active.get_current_device(), key  # a compiled kernel is loaded to one device
        with _lock:
            if (variant := _under_way.get(place)) is None:
                future = self.pool.submit(self._made, self.is_after_ready, key, compile)
                variant = _under_way[place] = FutureKernel(*at_end, future)
                future.add_done_callback(lambda _: _arrived(place))
            return variant

    def _made(self, is_after_ready: bool, key: str, compile: Callable[[], Any]) -> Any:
        try:
            return kernel_log.on_behalf(is_after_ready, lambda: with_launcher(compile_once(key, compile)))
        except kernel_log.LateKernelError as error:
            self.refused = error
            raise

    def settle(self, found: Iterable[Any]) -> None:
        """Put the compiled kernels in their places. One that failed is compiled again at its launch, which raises."""
        for variant in found:
            kernel, compiled = self.pending[variant], None
            try:
                with _lock:
                    compiled = variant.result()
            except Exception as error:
                self.failed.append(kernel.__name__)
                logger.info("hf_paged: %s is compiled at its first launch: %r", kernel.__name__, error)
            for variants, *_ in list(kernel.device_caches.values()):
                for key in [key for key, value in list(variants.items()) if value is variant]:
                    if compiled is None:
                        del variants[key]
                    else:
                        variants[key] = compiled


class _FromDisk(_LaunchesNothing):
    """A run that loads kernels from the disk.

    Args:
        miss: called with Triton's key, compiler and finalizer of a kernel that is not there.
    """

    def __init__(self, miss: Callable[..., None]) -> None:
        self._miss, self._name = miss, ""

    def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        self._name = kernel.__name__
        super().launch(kernel, grid, *args, **options)

    def submit(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], object], *_: Any) -> Any:
        if not _lies_on_disk(key, self._name):
            return self._miss(key, compile, finalize)
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
    """Return the function with other values of some globals of its module."""
    return FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__,
                        function.__closure__)


def _lies_on_disk(key: str, name: str) -> bool:
    """Return whether Triton's cache on disk has the kernel of this key, which then takes milliseconds to load."""
    with suppress(Exception):  # another version's cache: then it is compiled, or found, in a thread
        return bool(cache_folder(key).get_group(f"{name[:150]}.json"))  # so much of the name stands in the file's
    return False


# By device and Triton's key: not every version keeps a `FutureKernel` before it is there.
_under_way: dict[tuple[int, str], Any] = {}
_ahead: dict[tuple[int, str], Future[object]] = {}
_lock = threading.RLock()


def _arrived(place: tuple[int, str]) -> None:
    with _lock, suppress(Exception):  # `settle` says what there is to say of an error
        _under_way.pop(place).result()


class _Thread(threading.local):
    dry_run: _LaunchesNothing | None = None


_thread = _Thread()


@contextmanager
def _submits_to(mode: _Watch | _LaunchesNothing) -> Iterator[None]:
    """Let Triton call ``mode.submit`` in this thread for a kernel that is neither compiled nor under way."""
    before = active_mode.get()
    try:
        active_mode.set(mode)
        yield
    finally:  # also where an interrupt came before the mode was another
        active_mode.set(before)


_hashing = ProcessLock()  # while a thread hashes a function, its hash in the eyes of others is none that can be used
_being_hashed: set[Any] = set()


class _Noted:
    """A kernel of Triton that dry runs do not launch. It fuses products and sums unless its launch says otherwise.

    Triton 3.10 has the other default.
    """

    _compile: Callable[..., Any]
    hash: str | None
    fn: Callable[..., Any]

    @property
    def compile(self) -> Callable[..., Any]:
        """Triton's compiler, which Triton sets when it first needs a kernel, with a note in the log for each call."""
        return self._compile

    @compile.setter
    def compile(self, compile: Callable[..., Any]) -> None:
        self._compile = kernel_log.noting(compile)

    @property
    def cache_key(self) -> str:
        """Return Triton's key of the source, from which the key of a compiled kernel on the disk is made.

        3.6 misses constants of called functions that were not hashed before, so that the key would depend on the order
        in which a process needs its kernels: here they are hashed first.
        """
        with _hashing.rlock:
            if self.hash is None:
                _hash_called(self.fn)
            return super().cache_key  # type: ignore[misc]

    def _pack_args(self, *args: Any) -> Any:
        """Note a variant that is missing: Triton calls this before it compiles one."""
        with suppress(Exception):  # another version has other arguments
            _, _, bound_args, _, options = args
            if (record := record_of(self, bound_args, options)) is not None:
                kernel_log.note_variant(record)
        return super()._pack_args(*args)  # type: ignore[misc]

    def run(self, *args: Any, **options: Any) -> Any:
        options.setdefault("enable_fp_fusion", True)
        return super().run(*args, **options)  # type: ignore[misc]

    def __getitem__(self, grid: Any) -> Any:
        dry_run = _thread.dry_run
        return super().__getitem__(grid) if dry_run is None else partial(dry_run.launch, self, grid)  # type: ignore[misc]


def _hash_called(function: Any) -> None:
    """Hash the functions of Triton that a function calls, inner ones first. `_hashing` is held."""
    if function in _being_hashed:  # they call each other
        return
    _being_hashed.add(function)
    try:
        for called in map(function.__globals__.get, function.__code__.co_names):
            if isinstance(called, JITCallable):
                if not isinstance(called, _Noted):
                    _hash_called(called.fn)
                called.cache_key  # noqa: B018
    finally:
        _being_hashed.discard(function)


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


def compiled_together(run: Callable[[], Result], later: Iterable[Callable[[], object]] = (), *,
                      may_break_off: bool = True) -> Result:
    """``run()``, whose kernels are compiled before, side by side, as far as they are not.

    Where a kernel is missing, `run` is called three times: until the first one is missed, dry, and at last as it should
    be. So it has to come to the same if it is repeated, and must neither wait for the device nor for other ranks. In
    the dry run tensors begin as zeros in place of memory as it comes, so that what a kernel did not write is a valid
    index. A kernel that does not compile is left to its launch, which raises what there is to raise. Inside of another
    such call it is just ``run()``.

    Args:
        later: what will be launched soon. It is run dry, one after the other, as long as `run` has to wait; what it
            misses is compiled in the background.
        may_break_off: False if other ranks come to `run`, too, and would wait for what it leaves out: it is called
            dry, whether a kernel is missing or not, and once as it should be. A dry run waits for no rank.
    """
    if is_dry() or active_mode is None or active_mode.get() is not None:
        return run()
    if not (early := prepare_triton()).done():
        wait([early])  # the first kernel that is missed would do it again
    if may_break_off:
        try:
            with _submits_to(_Watch()):
                return run()
        except _Missing:
            pass
    with kernel_log.waiting():
        refused = _compile_dry(_DryRun(), [run], later).refused
    if refused is not None and may_break_off:  # its launch would find it on the disk
        raise refused
    return run()


def _compile_dry(dry: _DryRun, works: Iterable[Callable[[], object]],
                 later: Iterable[Callable[[], object]] = ()) -> _DryRun:
    """Run works dry, and wait for the kernels that they miss; run ``later`` dry as long as that takes.

    The result's ``refused`` is the error of a kernel that requests of a ready engine should not have had to wait for.
    """
    try:
        for work in works:
            dry.run(work)
        dry.is_after_ready = False
        needed = list(dry.pending)
        under_way = [future for variant in needed if (future := variant.future) is not None]
        _wait_for(under_way, (partial(dry.run, further) for further in later))
    finally:
        dry.pool.shutdown(wait=False)
    dry.settle(needed)
    return dry


def compiled_before(works: Iterable[Callable[[], object]], *, is_complete: bool = False) -> list[str]:
    """Compile, side by side, the kernels that works will launch. The works are run dry, one after the other.

    Args:
        is_complete: see `is_complete_dry_run`.

    Returns:
        Names of kernels that do not compile.
    """
    if active_mode is None:
        return []
    wait([prepare_triton()])
    return _compile_dry(_DryRun(is_complete=is_complete), works).failed


def loaded(records: Iterable[str]) -> list[Callable[[], object]]:
    """Load the variants of records (`variants.py`) that lie in Triton's cache on the disk, and return launches of those
    that do not, for `compiled_before`. Records of another version are left out."""
    missing: list[Callable[[], object]] = []
    if active_mode is None or not (records := list(records)):
        return missing
    wait([prepare_triton()])
    for record in records:
        try:
            launch = launch_of(record)
            _FromDisk(lambda *_, launch=launch: missing.append(launch)).run(launch)
        except Exception as error:
            logger.info("hf_paged: a kernel of an earlier process is not loaded: %r", error)
    return missing


def compiled_ahead(run: Callable[[], object]) -> list[Future[object]]:
    """Have all kernels of ``run()`` that are not there compiled by other processes, and wait for nothing.

    `run` is called dry. What is compiled already, or lies in Triton's cache on the disk, is loaded at once. Returns a
    future for each other kernel, which is done when it is there, or has its compiler's error. A program that ends does
    not wait either.
    """
    if active_mode is None:
        return []
    missing: list[Future[object]] = []
    with _Zeros():
        _FromDisk(lambda *kernel: missing.append(_begin_ahead(*kernel))).run(run)
    return missing


def is_dry() -> bool:
    """Return whether this thread is in a dry run."""
    return _thread.dry_run is not None


def is_complete_dry_run() -> bool:
    """Return whether this thread is in a dry run that also misses kernels for which no step waits."""
    return _thread.dry_run is not None and _thread.dry_run.is_complete


def in_background(prepare: Callable[[], object]) -> Future[object]:
    """Call `prepare` in a thread and return its future."""
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
    """Wait until all are done, with a line of progress if that takes long."""
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
