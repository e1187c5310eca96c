"""A kernel compiled by a process of its own, which leaves it in Triton's cache on the disk.

Triton's code generator holds Python's lock for seconds where a kernel is large. A thread that compiles would take it
from the thread that launches the steps of running requests, each of which then takes many times as long.
Processes that miss the same kernel at the same time, as the ranks of a model do, take turns (`compile_once`).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hf_paged.device.cuda import num_cores
from hf_paged.files import alone
from hf_paged.python_process import module_process

Compiled = TypeVar("Compiled")

_LIMIT_S = 300.0
# A compilation takes less. After it a process compiles by itself, so that no process waits for another for ever.
_LONGEST_WAIT_S = 120.0
_few_at_a_time = threading.BoundedSemaphore(max(1, num_cores() // 4))  # what runs beside them is to keep its cores


def request_of(compile: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the arguments with which `_compile` compiles what ``compile``, Triton's ``async_compile``, would compile.

    Raises:
        KeyError: it is another version's.
        ValueError: another process would not find the kernel.
    """
    found = inspect.getclosurevars(compile).nonlocals
    source = found["src"]
    module, name = source.fn.fn.__module__, source.fn.__name__
    if module == "__main__" or getattr(sys.modules[module], name, None) is not source.fn:
        raise ValueError(f"kernel={module}.{name}: expected one that can be imported")
    arguments = source.signature, source.constants, source.attrs
    return module, name, type(source), arguments, found["target"], dict(vars(found["options"]))


def _compile(module: str, name: str, source_type: type, arguments: tuple[Any, ...], target: Any,
             options: dict[str, Any]) -> None:
    """Compile a kernel that is given by name, since its globals belong to its module."""
    kernel = getattr(importlib.import_module(module), name)
    from triton.compiler import compile

    compile(source_type(kernel, *arguments), target=target, options=options)


def compile_elsewhere(compile: Callable[[], Any]) -> None:
    """Compile in another process what ``compile()`` would compile, and wait; ``compile()`` then finds it on disk.

    Raises:
        Exception: no process can be started, or it failed: ``compile()`` does it, or says why it cannot be done.
    """
    # No GPU: the process has no use for memory there.
    process = module_process(__name__, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    request = pickle.dumps(request_of(compile))
    with _few_at_a_time:
        subprocess.run(**process, input=request, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)


def compile_once(key: str, compile: Callable[[], Compiled]) -> Compiled:
    """Return ``compile()``, called after any other process that compiles the kernel of Triton's ``key``.

    The call then finds the kernel in Triton's cache on the disk.
    """
    with alone(_lock_file(key), _LONGEST_WAIT_S):
        return compile()


def _lock_file(key: str) -> Path | None:
    with suppress(Exception):  # another version's cache, or one that is no folder
        return Path(cache_folder(key).lock_path)
    return None


def cache_folder(key: str) -> Any:
    """Return Triton's manager of the folder on the disk for the kernel of its ``key``."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


if __name__ == "__main__":
    os.nice(5)
    _compile(*pickle.load(sys.stdin.buffer))
