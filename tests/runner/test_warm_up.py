"""What an engine does before it is ready, by `PagedConfig.warmup`, with stand-ins for the model and the compiler."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hf_paged.config import PagedConfig
from hf_paged.runner import warm_up as module
from hf_paged.runner.manifest import Manifest
from hf_paged.runner.warm_up import WarmUp

SPEC = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.fixture
def done(monkeypatch):
    """What is done, in order. Of two kernels of earlier processes one lies on the disk; there are two sizes of steps.
    """
    done = []

    def in_background(work):
        future = Future()
        future.set_result(work())
        return future

    def loaded(records):
        done.append("load")
        return ["evicted"]

    monkeypatch.setattr(module, "in_background", in_background)
    monkeypatch.setattr(module, "loaded", loaded)
    monkeypatch.setattr(module, "compiled_before", lambda works: done.append(("compile", *works)))
    monkeypatch.setattr(module, "dry_runs", lambda steps, rows, tokens, *, optional: [
        f"{rows} rows", f"{tokens} tokens", *(["options"] if optional else [])])
    monkeypatch.setattr(module, "tower_launches", lambda model, device: [f"the tower of {model}"])
    monkeypatch.setattr(module, "manifest_path", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return done


def runner(done, graphs):
    return SimpleNamespace(device=SPEC.device, prepare=lambda: None,
                           capture_ahead=lambda rows, others: done.append(("capture", rows, *others)),
                           graphs=SimpleNamespace(steps=None, uses=None) if graphs else None)


def warmed_up(done, warmup, *, graphs=True, is_parallel=False, **options):
    group = SimpleNamespace(is_parallel=is_parallel, rank=0)
    executor = SimpleNamespace(kv_spec=lambda: SPEC, group=group, replica=None, source="it")
    warm_up = WarmUp(executor, PagedConfig(warmup=warmup, max_num_seqs=8, max_num_batched_tokens=64))
    warm_up.begin()
    warm_up.get_ready(made := runner(done, graphs), **options)
    return warm_up, made


ALL = ("compile", "evicted", "8 rows", "64 tokens", "options", "the tower of it")


@pytest.mark.parametrize(("warmup", "options", "expected"), [
    (False, {}, []), (True, {}, ["load", ("compile", "evicted")]), ("full", {}, ["load", ALL, ("capture", 8)]),
    (True, {"is_full": True}, ["load", ALL, ("capture", 8)]),
    (False, {"is_full": True}, [("compile", *ALL[2:]), ("capture", 8)]),
    ("full", {"graphs": False}, ["load", ("compile", "evicted", ALL[-1]), ("capture", 8)]),  # no steps without graphs
    ("full", {"is_parallel": True}, ["load", ALL]),
])
def test_the_config_says_what_is_done(done, warmup, options, expected):
    warmed_up(done, warmup, **options)
    assert done == expected


@pytest.mark.parametrize(("warmup", "options", "is_done"), [
    (False, {}, False), (True, {}, False), ("full", {}, True), (False, {"is_full": True}, True),
])
def test_no_kernel_should_be_missing_once_steps_of_all_sizes_were_looked_at(done, warmup, options, is_done):
    assert warmed_up(done, warmup, **options)[0].is_done is is_done


def test_graphs_count_their_uses_in_the_manifest(done):
    warm_up, made = warmed_up(done, True)
    assert made.graphs.uses is warm_up.manifest.uses


def test_a_manifest_that_cannot_be_opened_costs_nothing(done, monkeypatch):
    def fail(*args):
        raise PermissionError

    monkeypatch.setattr(module, "manifest_path", fail)
    assert isinstance(warmed_up(done, True)[0].manifest, Manifest) and done == []
