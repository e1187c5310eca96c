"""Triton kernels run in Triton's interpreter where there is no GPU; it has to be chosen before Triton is imported.

With ``SIMULATED_GPU=1`` in the environment they are compiled for a Hopper GPU, which is simulated (`simulated_gpu`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

GUARD, POISON = 64, 77.0
COMPILED = torch.cuda.is_available()
SIMULATED = os.environ.get("SIMULATED_GPU") == "1"
# Whoever imports Triton first (transformers does) decides for the whole process.
TOO_LATE = not (COMPILED or SIMULATED) and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if not COMPILED:
    os.environ["TRITON_INTERPRET"] = "0" if SIMULATED else "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs a Triton kernel on CPU tensors")
    if SIMULATED:
        from pretended_gpu import pretend
        from simulated_gpu import launches

        pretend()
        launches.simulate()
    elif not COMPILED and not TOO_LATE:
        _interpret_quickly()


def _interpret_quickly() -> None:
    """Half of the interpreter's time goes into patching triton.language anew in every call of a jitted function by
    another; here each function has it patched once, for good (as the interpreter leaves it after nested calls).
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # another version: slow, as it comes
        return
    patch_lang: Callable[[Any], Any] = interpreter._patch_lang

    @functools.cache
    def patch_lang_once(fn: Any) -> Any:
        patch_lang(fn)
        return interpreter._LangPatchScope()  # what its user restores: nothing

    interpreter._patch_lang = patch_lang_once
    _without_overflow_checks()


def _without_overflow_checks() -> None:
    """Another third goes into conditions of a device_assert, which does nothing without its debug option."""
    from triton.language import semantic

    if hasattr(getattr(semantic, "TritonSemantic", None), "binary_op_sanitize_overflow_impl"):
        semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreted") is None:
        return
    if COMPILED:
        pytest.skip("kernels are compiled in this process: the gpu tests cover them")
    if TOO_LATE:
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set: set it in tests/conftest.py", pytrace=False)


@pytest.fixture
def guarded_outputs(monkeypatch):
    """What the kernels allocate starts poisoned, inside a buffer whose ends nobody may write."""
    buffers = []

    def empty(*size, **options):
        size = torch.Size(size if isinstance(size[0], int) else size[0])
        buffers.append(torch.full((size.numel() + 2 * GUARD,), POISON, **options))
        return buffers[-1][GUARD : GUARD + size.numel()].view(size)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    for buffer in buffers:
        assert (buffer[:GUARD] == POISON).all()
        assert (buffer[-GUARD:] == POISON).all()
