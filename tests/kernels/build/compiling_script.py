"""Kernels compiled side by side, without a GPU: `test_compiling.py` names cases, and looks at what came of them.

Each line of the input is the name of a case and a folder for what is compiled. The case runs in a fork of this process,
which has imported torch and Triton for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from pretended_gpu import (
    GPU,
    Driver,
    compile_nothing,
    compiled,
    launched,
    loaded,
    made,
    no_c_compiler_in,
    pretend,
)

from hf_paged.kernels import weights_checksum
from hf_paged.kernels._triton import jit
from hf_paged.kernels.build import compiling, kernel_log
from hf_paged.kernels.build.compiling import compiled_ahead, compiled_together, noted


@jit()
def twice(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, 2 * tl.load(x + at))


@jit()
def plus_one(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at) + 1)


@jit()
def broken(x, out, TILE: tl.constexpr):
    tl.store(out + tl.arange(0, TILE), nobody_knows_this)  # noqa: F821


@triton.jit
def another_librarys(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at))


X = torch.arange(64.0)


class Work:
    """Launches kernels one after the other; whether what each was to write began as zeros, by call."""

    def __init__(self, *kernels: Any, tile: int = 32, then: Callable[[], object] = lambda: None) -> None:
        self.kernels, self.tile, self.then = kernels, tile, then
        self.began_as_zeros: list[list[bool]] = []

    def __call__(self) -> str:
        self.began_as_zeros.append([])
        for kernel in self.kernels:
            out = torch.empty(64)
            self.began_as_zeros[-1].append(bool((out == 0.0).all()))
            kernel[(1,)](X, out, TILE=self.tile)
            self.then()
        return "done"


def seen(work: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """What came of compiling `work` together."""
    del launched[:], compiled[:], made[:], loaded[:]
    error = result = None
    try:
        result = compiled_together(work, **options)
    except Exception as raised:
        error = type(raised).__name__
    for thread in threading.enumerate():
        if thread.name.startswith("hf_paged-compile"):
            thread.join()
    return {"result": result, "error": error, "launched": list(launched), "compiled": list(compiled),
            "made": list(made), "loaded": list(loaded), "calls": len(getattr(work, "began_as_zeros", ()))}


def launches() -> dict[str, Any]:
    unused = jit()(plus_one.fn)
    found = {"nothing known": seen(Work(twice, plus_one)), "all known": seen(Work(twice, plus_one)),
             "one known": seen(Work(twice, jit()(plus_one.fn)))}
    return {**found, "read": ["params" in vars(kernel) for kernel in (twice, plus_one, unused)]}


def with_others() -> dict[str, Any]:
    """Work to which another rank comes, too: its kernels are not known, then known."""
    return {name: seen(Work(twice, plus_one), may_break_off=False) for name in ("nothing known", "all known")}


def zeros() -> dict[str, Any]:
    work = Work(twice, plus_one, tile=16)
    poison = [torch.full((64,), 3.0) for _ in range(64)]
    del poison  # what is freed is lent again as it is
    compiled_together(work)
    return {"zeros": work.began_as_zeros}


def failures() -> dict[str, Any]:
    found = {"does not compile": seen(Work(twice, broken)), "again": seen(Work(twice, broken))}

    def raises() -> None:
        raise ValueError

    found["raises"] = seen(Work(jit()(twice.fn), then=raises))
    found["after that"] = seen(Work(twice, plus_one))
    return found


def others() -> dict[str, Any]:
    """Another thread's launches, and another library's, are launches while this thread's are none."""
    compiled_together(Work(twice, plus_one))
    started: list[list[str]] = []

    def launch_in_thread() -> None:
        before = len(launched)
        thread = threading.Thread(target=Work(twice))
        thread.start()
        thread.join()
        started.append(launched[before:])

    found = seen(Work(jit()(plus_one.fn), then=launch_in_thread))
    return {**found, "threads": started, "library": seen(Work(another_librarys, jit()(plus_one.fn))),
            "noted": seen(Work(noted(triton.jit(another_librarys.fn))))}


def later() -> dict[str, Any]:
    compiling._PATIENCE_S = 0.0
    coming = [Work(plus_one, tile=64), Work(plus_one, tile=8)]
    found = seen(Work(twice, tile=64), later=coming)
    known = seen(Work(twice, tile=64), later=[Work(plus_one, tile=4)])
    return {**found, "coming": [len(work.began_as_zeros) for work in coming], "then": seen(coming[0]), "known": known}


def devices() -> dict[str, Any]:
    """A kernel that is under way for one GPU, and wanted on another."""
    compiling._DryRun().run(Work(plus_one))
    Driver.device = 1
    found = seen(Work(plus_one))
    kernels = [kernel for device in (0, 1) for kernel in plus_one.device_caches[device][0].values()]
    return {**found, "kernels": len(set(map(id, kernels)))}


def hook() -> dict[str, Any]:
    """What somebody else has Triton call behind every kernel that it compiled, and takes its time."""
    told: list[str] = []

    def tell(*, fn: Any, **_: Any) -> None:
        told.append(fn.name)
        time.sleep(0.1)

    triton.knobs.runtime.jit_post_compile_hook = tell
    return {**seen(Work(twice, plus_one)), "told": told}


def fork() -> dict[str, Any]:
    """In a child, while the parent prepares Triton in a thread that the child does not have."""
    compiling._hash_triton = lambda: time.sleep(0.5)
    begun = compiling.prepare_triton()
    weights_checksum.warm_up(GPU)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        weights_checksum._warmed_up(GPU.index).result()
        os._exit(0 if seen(Work(twice))["launched"] == ["twice"] else 1)
    return {"begun": not begun.done(), "status": os.waitpid(child, 0)[1]}


def nested() -> dict[str, Any]:
    inner = Work(plus_one)
    return seen(Work(twice, then=lambda: compiled_together(inner)))


def disk() -> dict[str, Any]:
    """What threads have compiled is found on the disk by a plain launch."""
    found = seen(Work(twice, plus_one))
    for kernel in (twice, plus_one):
        kernel.device_caches.clear()
    del compiled[:]
    Work(twice, plus_one)()
    return {**found, "anew": list(compiled)}


def ahead() -> dict[str, Any]:
    """Kernels that somebody has compiled, and does not wait for."""
    def of(work: Work) -> dict[str, Any]:
        del launched[:], compiled[:], made[:], loaded[:]
        futures = compiled_ahead(work)
        is_shared = all(again in futures for again in compiled_ahead(work))
        error = next(filter(None, (future.exception(timeout=200) for future in futures)), None)
        return {"at once": not futures, "shared": is_shared, "error": type(error).__name__ if error else None,
                "launched": list(launched), "compiled": list(compiled),
                "made": list(made), "loaded": list(loaded), "calls": len(work.began_as_zeros)}

    found = {"missing": of(Work(twice, plus_one)), "then": seen(Work(twice, plus_one)), "known": of(Work(twice))}
    for kernel in (twice, plus_one):
        kernel.device_caches.clear()
    found["on the disk"] = of(Work(twice, plus_one))
    found["behind it"] = seen(Work(twice, plus_one))
    found["one is missing"] = of(Work(twice, jit()(another_librarys.fn)))
    found["broken"] = of(Work(broken))
    found["dry afterwards"] = compiling.is_dry()
    return found


def no_c_compiler() -> dict[str, Any]:
    """For those who compile; whoever launches has one."""
    no_c_compiler_in.append("hf_paged-compile")
    found = seen(Work(twice, plus_one))
    [future] = compiled_ahead(Work(jit()(another_librarys.fn)))
    error = future.exception(timeout=200)
    return {**found, "ahead": type(error).__name__ if error else None, "tried": list(made)}


def log() -> dict[str, Any]:
    """What the log counts of kernels that are compiled, and then found on the disk."""
    found: dict[str, Any] = {}
    for name, run in (("compiled", compiled_together), ("loaded", compiled_together), ("known", compiled_together)):
        before, delays = kernel_log.counts(), kernel_log.StepDelays()
        with delays.step():
            run(Work(twice, plus_one))
        found[name] = [now - then for now, then in zip(kernel_log.counts(), before, strict=True)]
        found[f"{name}: waited"] = delays.compile_seconds, delays.longest, delays.num_delayed
        if name == "compiled":
            for kernel in (twice, plus_one):
                kernel.device_caches.clear()
    return found


def after_ready() -> dict[str, Any]:
    """What the log says of kernels that requests wait for, by policy, and of others."""
    texts: list[str] = []
    kernel_log.logger.handle = lambda record: texts.append(record.getMessage())
    delays = kernel_log.StepDelays()

    def said(work: Callable[[], Any], policy: str = "", **options: Any) -> dict[str, Any]:
        os.environ[kernel_log.AFTER_READY] = policy
        texts.clear()
        with delays.step():
            found = seen(work, **options)
        return {"texts": list(texts), "error": found["error"], "launched": found["launched"],
                "compiled": len(found["compiled"])}

    found = {"before": said(Work(twice))}
    delays.is_ready = True
    found["after"] = said(Work(twice, plus_one))
    found["at its launch"] = said(lambda: Work(jit()(twice.fn), tile=8)())
    for kernel in (twice, plus_one):
        kernel.device_caches.clear()
    found["again"] = said(Work(twice, plus_one))
    found["ignored"] = said(Work(plus_one, tile=8), "ignore")
    found["refused"] = said(Work(plus_one, tile=16), "error")
    compiling._PATIENCE_S = 0.0
    found["for later"] = said(Work(plus_one, tile=2), later=[Work(twice, tile=4)])
    return found


def records() -> dict[str, Any]:
    """What becomes of the records of two variants: here, where both are known, and where they lie on the disk."""
    kernel, memory = weights_checksum._checksum_kernel, torch.zeros(8, dtype=torch.int64)

    def work() -> None:
        for chunks in (memory, memory[1:]):
            kernel[(1,)](chunks, memory, TILE=64, num_warps=4)

    found: dict[str, Any] = {}
    work()
    noted = kernel_log.variants()
    found["noted"] = [json.loads(record)[0] for record in noted]
    for name in ("known", "on the disk"):
        del launched[:], compiled[:]
        missing = compiling.loaded(["{", *noted, noted[0].replace("hf_paged", "nowhere")])
        found[name] = {"missing": len(missing), "launched": list(launched), "loaded": [hit for *_, hit in compiled]}
        work()
        found[name]["after launches"] = len(compiled)
        kernel.device_caches.clear()
    os.environ["TRITON_CACHE_DIR"] += "-other"
    missing = compiling.loaded(noted)
    compiling.compiled_before(missing)
    del compiled[:]
    work()
    return {**found, "missing": len(missing), "then": list(compiled)}


CASES = {case.__name__: case for case in (launches, zeros, failures, others, later, nested, disk, devices, hook, fork,
                                          ahead, no_c_compiler, with_others, log, after_ready, records)}


def carry_out(name: str, folder: str) -> dict[str, Any]:
    os.environ["TRITON_CACHE_DIR"] = folder
    pretend()
    if name not in ("disk", "failures", "ahead", "no_c_compiler", "log", "records"):
        compile_nothing({"later": 0.1, "devices": 0.5, "after_ready": 0.1}.get(name, 0.0))
    return CASES[name]()


if __name__ == "__main__":
    for line in sys.stdin:
        if not (child := os.fork()):
            try:
                print(json.dumps(carry_out(*line.split(maxsplit=1))), flush=True)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the case {line.split()[0]} failed")
