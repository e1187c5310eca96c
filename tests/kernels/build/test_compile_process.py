"""Kernels that another process compiles are found on the disk by this one; no GPU is needed to compile for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hf_paged
from hf_paged.kernels.build.compile_process import compile_elsewhere, request_of

pytest.importorskip("triton.experimental.gluon")

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def twice(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))

@triton.jit
def broken(x, out, N: tl.constexpr):
    tl.no_such_thing(x)
"""
SCRIPT = """
import json, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
import its_kernels
from hf_paged.kernels.build.compile_process import compile_elsewhere

def closure(kernel, target=GPUTarget("cuda", 90, 32)):
    types = {"x": "*fp32", "out": "*fp32", "N": "constexpr"}
    src = ASTSource(kernel, types, {(2,): 64}, {(0,): [["tt.divisibility", 16]]})
    options = make_backend(target).parse_options({"num_warps": 2})
    def async_compile():
        return triton.compile(src, target=target, options=options.__dict__)
    return async_compile

made = []
make_ir = ASTSource.make_ir
ASTSource.make_ir = lambda self, *args: made.append(self.name) or make_ir(self, *args)
compile_elsewhere(closure(its_kernels.twice))
compiled = closure(its_kernels.twice)()
try:
    compile_elsewhere(closure(its_kernels.broken))
    failed = False
except subprocess.CalledProcessError:
    failed = True
print(json.dumps({"warps": compiled.metadata.num_warps, "made here": made, "failed": failed}))
"""


def test_what_a_process_compiled_is_what_a_launch_looks_for(tmp_path):
    (tmp_path / "its_kernels.py").write_text(KERNELS)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(hf_paged.__file__).parents[1]), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    (working_directory := tmp_path / "here").mkdir()
    if sys.version_info >= (3, 11):  # before, "-m" looks into the working directory first
        (working_directory / "pickle.py").write_text("raise SystemExit('of the working directory')")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environment, text=True,
                          capture_output=True, timeout=200, cwd=working_directory)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"warps": 2, "made here": [], "failed": True}


def test_another_versions_compiler_is_left_to_the_caller():
    with pytest.raises(KeyError):
        compile_elsewhere(lambda: None)


@pytest.mark.parametrize("executable", ["/usr/bin/uwsgi", "", None])
def test_a_program_that_is_no_python_is_not_started(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match="expected a Python"):
        compile_elsewhere(lambda: None)


@pytest.mark.parametrize(("module", "is_there"), [("__main__", True), (__name__, False)])
def test_a_kernel_that_no_process_would_find_is_left_to_the_caller(monkeypatch, module, is_there):
    src = SimpleNamespace(fn=SimpleNamespace(fn=SimpleNamespace(__module__=module), __name__="its_kernel"))
    monkeypatch.setattr(sys.modules[module], "its_kernel", src.fn if is_there else None, raising=False)
    with pytest.raises(ValueError, match="its_kernel"):
        request_of(lambda: src)
