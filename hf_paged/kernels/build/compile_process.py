"""A kernel compiled by a process of its own, which leaves it in Triton's cache on the disk.

Triton's code generator holds Python's lock for seconds where a kernel is large. A thread that compiles would take it
from the thread that launches the steps of running requests, each of which then takes many times as long.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from hf_paged.python_process import module_process

_LIMIT_S = 300.0
_one_at_a_time = threading.Lock()  # what runs beside them is to keep its cores


class Request(NamedTuple):
    """What Triton's compiler is called with; the kernel is named, since its globals stay with its module."""

    module: str
    name: str
    source_type: type
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    target: Any
    options: dict[str, Any]

    def compile(self) -> None:
        kernel = getattr(importlib.import_module(self.module), self.name)
        from triton.compiler import compile

        source = self.source_type(kernel, self.signature, self.constants, self.attrs)
        compile(source, target=self.target, options=self.options)


def request_of(compile: Callable[[], Any]) -> Request:
    """What Triton's ``async_compile``, which its JIT hands to an asynchronous mode, would compile.

    Raises:
        KeyError: it is another version's.
        ValueError: another process would not find the kernel.
    """
    found = inspect.getclosurevars(compile).nonlocals
    source = found["src"]
    module, name = source.fn.fn.__module__, source.fn.__name__
    if module == "__main__" or getattr(sys.modules[module], name, None) is not source.fn:
        raise ValueError(f"kernel={module}.{name}: expected one that can be imported")
    return Request(module, name, type(source), source.signature, source.constants, source.attrs, found["target"],
                   dict(vars(found["options"])))


def compile_elsewhere(compile: Callable[[], Any]) -> None:
    """Have another process compile what ``compile()`` would, which then finds it on the disk; waits for it.

    Raises:
        Exception: no process can be started, or it failed: ``compile()`` does it, or says why it cannot be done.
    """
    # No GPU: the process has no use for memory there.
    process = module_process(__name__, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    request = pickle.dumps(request_of(compile))
    with _one_at_a_time:
        subprocess.run(**process, input=request, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    os.nice(5)
    pickle.load(sys.stdin.buffer).compile()
