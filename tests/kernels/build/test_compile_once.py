"""Processes that miss one kernel at the same time: one compiles, and the others wait for its file, but not for ever."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace

import pytest

from hf_paged import files
from hf_paged.kernels.build import compile_process as module
from hf_paged.kernels.build.compile_process import compile_once

pytest.importorskip("triton")


@pytest.fixture
def held(tmp_path, monkeypatch):
    """The kernel's lock, which another open file holds as another process would."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path = module._lock_file("a key")
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_a_kernel_is_compiled_once_another_process_has_compiled_it(held, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr(files.time, "sleep", sleep)
    assert compile_once("another key", lambda: len(waits)) == 0, "every kernel has a lock of its own"
    assert compile_once("a key", lambda: len(waits)) == 3
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was released


def test_no_process_waits_for_ever(held, monkeypatch):
    """For one that is stopped, for instance."""
    clock = iter(range(0, 1000, 50))
    time = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: next(clock))
    monkeypatch.setattr(files, "time", time)
    assert compile_once("a key", lambda: "compiled") == "compiled"


def test_a_failed_compilation_releases_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        compile_once("a key", lambda: 1 // 0)
    with module._lock_file("a key").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_fork_in_the_meantime_does_not_keep_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path, own_lock, copies = module._lock_file("a key"), files._lock, []

    def lock(descriptor, most_seconds):
        copies.append(os.dup(descriptor))  # as a fork has one
        return own_lock(descriptor, most_seconds)

    monkeypatch.setattr(files, "_lock", lock)
    compile_once("a key", lambda: None)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(*copies)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_without_a_lock_a_kernel_is_compiled_all_the_same(tmp_path, monkeypatch, error):
    """On a file system that has none, or with a cache that is no folder."""
    def raises(*args):
        raise error

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if error is OSError:
        monkeypatch.setattr(fcntl, "flock", raises)
    else:
        monkeypatch.setattr("triton.runtime.cache.get_cache_manager", raises)
    assert compile_once("a key", lambda: "compiled") == "compiled"
