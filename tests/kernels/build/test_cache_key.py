"""The key of a kernel on the disk is one in all processes, in whatever order they need their kernels."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

jit = pytest.importorskip("triton.runtime.jit")

CYCLE = """

def lid(x):
    return box(x).lid

def box(x):
    return lid(x) * HEIGHT

lid, box = Kernel(lid), Kernel(box)
"""
SOURCE = """
import triton.language as tl
from triton.runtime.jit import JITFunction
from hf_paged.kernels.build.compiling import Kernel

WIDTH, HEIGHT = tl.constexpr(3), tl.constexpr({height})

def innermost(x):
    return x + HEIGHT

def between(x):
    return innermost(x) if x > 0 else between(-x)

def inner(x):
    return between(x) * WIDTH

def kernel(x, y):
    tl.store(y, inner(tl.load(x)))

innermost, between, inner, kernel = Kernel(innermost), JITFunction(between), Kernel(inner), Kernel(kernel)
"""
NAMES = ("innermost", "inner", "kernel")


def update_hash(self, func):
    """Triton 3.6's, without its check: constants of a function are taken before the function is read for them."""
    self.used_global_vals.update(func.used_global_vals)
    self.hasher.update((func.cache_key + str(getattr(func, "noinline", False))).encode())


@pytest.fixture(params=[None, update_hash], ids=["this", "3.6"])
def version(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(jit.DependenciesFinder, "_update_hash", request.param)


def keys(tmp_path, order, height=5):
    """Keys of new kernels, whose first use is in this order."""
    module = made(tmp_path, SOURCE.format(height=height))
    found = {name: getattr(module, name).cache_key for name in order}
    assert found == {name: getattr(module, name).cache_key for name in order}
    return found


def made(tmp_path, source):
    path = tmp_path / f"kernels_{len(list(tmp_path.iterdir()))}.py"  # its compiled code must not be another one's
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("some_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_order_of_first_uses_is_not_in_the_key(tmp_path, version):
    expected, *others = [keys(tmp_path, order) for order in permutations(NAMES)]
    assert all(other == expected for other in others)


def test_a_constant_of_a_called_function_is_in_the_key(tmp_path, version):
    first, second = keys(tmp_path, NAMES[::-1]), keys(tmp_path, NAMES[::-1], height=6)
    assert not set(first.values()) & set(second.values())


def test_threads_that_hash_at_once_come_to_the_same_key(tmp_path, version, monkeypatch):
    """None takes a function that another one is hashing for one that is hashed."""
    expected, parse = keys(tmp_path, NAMES), jit.JITCallable.parse

    def slowly(self):
        time.sleep(0.02)
        return parse(self)

    monkeypatch.setattr(jit.JITCallable, "parse", slowly)
    for order in (NAMES, NAMES[::-1]):
        module = made(tmp_path, SOURCE.format(height=5))
        with ThreadPoolExecutor(3) as pool:
            found = dict(zip(order, pool.map(lambda name, module=module: getattr(module, name).cache_key, order),
                             strict=True))
        assert found == expected


@pytest.mark.parametrize("names", [("box", "lid"), ("lid", "box")])
def test_functions_that_name_each_other_have_keys(tmp_path, version, names):
    """An attribute may have a function's name."""
    module = made(tmp_path, SOURCE.format(height=5) + CYCLE)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda name: getattr(module, name).cache_key, names))) == 2
