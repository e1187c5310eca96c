"""How ranks get ready: what `load_on_ranks` refuses, and what happens at the same time, in rank 0 and in a worker."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch_jobs import children
from safetensors.torch import load_file, save_file
from support import tiny_model

import hf_paged.engine.engine
from hf_paged import PagedConfig, PagedGenerator, generator
from hf_paged.engine import locked_core
from hf_paged.engine.follower import Follower
from hf_paged.errors import WorkerDiedError
from hf_paged.models import check_over_ranks
from hf_paged.parallel import checkpoint, loading
from hf_paged.parallel.group import ParallelGroup

SOON = 10.0


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_sizes_that_are_none(trained_path, size):
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=size)


@pytest.mark.parametrize("device", ["cuda:1", "meta"])
def test_devices_that_ranks_do_not_take(trained_path, device):
    expected = f"device='{device}': expected 'cuda', of which the ranks take 0 to 1, or 'cpu'"
    with pytest.raises(ValueError, match=expected):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=2, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_of_another_number_of_processes(trained_path, monkeypatch, device):
    """Under torchrun; said before anybody waits for the others, or takes a GPU that is not there."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: expected 1 or 3, the number of processes"):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=2, device=device)


# -- at the same time -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(vocab_size=2600).save_pretrained(folder)
    return str(folder)


@contextmanager
def nothing_left():
    """Afterwards there is no worker, process group or thread of the body's."""
    before = children()
    yield
    gc.collect()
    deadline = time.monotonic() + SOON
    while any(thread.name.startswith("hf_paged-") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hf_paged-")]
    assert children() <= before
    assert not dist.is_initialized()


def has_met(group: ParallelGroup) -> bool:
    return group._hosts is not None


@pytest.mark.slow
def test_a_worker_needs_no_transformers_to_meet_the_others():
    """They take seconds, which would be the meeting's."""
    code = "import sys, hf_paged.engine.follower; print(*{'transformers', 'accelerate'} & {*sys.modules})"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert (made.returncode, made.stdout, made.stderr) == (0, "\n", "")


def test_a_worker_loads_while_it_meets(monkeypatch):
    """The engine comes after both; each of the two threads makes the rank's GPU its own."""
    events, meets, current = [], [], {}
    loads = threading.Event()

    def meet(group, device, store):
        events.append("in time" if loads.wait(10) else "too late")  # no assert: an error here would end this process
        time.sleep(0.5)  # long enough for an engine that would not wait for the meeting
        events.append(("meet", group.rank, group.size, str(device), store))
        meets.append(threading.get_ident())

    def load(path, group, *, dtype, device, files, check_class):
        assert check_class is check_over_ranks
        events.append(("load", path, group.driven, dtype, str(device)))
        loads.set()
        return "model"

    class Engine:
        def __init__(self, *args, **options):
            events.append(("engine", args, options))

        def follow(self):
            events.append("follow" if gc.isenabled() else "follow, and collect no garbage")

    def set_device(device):
        current[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(ParallelGroup, "meet", meet)
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(hf_paged.engine.engine, "Engine", Engine)
    config = PagedConfig()
    gc.disable()  # as `worker.main`
    try:
        Follower("path", "bfloat16", "cuda", config).run(1, 2, "store")
    finally:
        gc.unfreeze()
        gc.enable()
    assert events == [
        ("load", "path", True, "bfloat16", "cuda:1"),
        "in time",
        ("meet", 1, 2, "cuda:1", "store"),
        ("engine", ("model", config), {"owns_device": True}),
        "follow",
    ]
    assert current == {threading.get_ident(): 1, meets[0]: 1}


@pytest.mark.slow
def test_rank_0_loads_before_the_others_come(tiny_path, monkeypatch):
    """Model and tokenizer; the ranks have met when its engine is built."""
    load, tokenizer_of, events = loading.load, generator.tokenizer_of, []

    def loads(path, group, **options):
        events.append(("load", has_met(group)))
        model = load(path, group, **options)
        deadline = time.monotonic() + 120
        while not has_met(group) and time.monotonic() < deadline:
            time.sleep(0.02)
        events.append(("loaded", has_met(group)))
        return model

    def stalls(self, device, store=None):
        time.sleep(1.0)
        meet(self, device, store)
        events.append("met")

    def looks_for_a_tokenizer(path, loading):
        events.append("tokenizer")
        return tokenizer_of(path, loading)

    meet = ParallelGroup.meet
    monkeypatch.setattr(loading, "load", loads)
    monkeypatch.setattr(generator, "tokenizer_of", looks_for_a_tokenizer)
    with nothing_left():
        with PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2, num_blocks=20) as over_ranks:
            assert events == [("load", False), ("loaded", True), "tokenizer"]
            expected = over_ranks.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids

        monkeypatch.setattr(loading, "load", load)
        monkeypatch.setattr(ParallelGroup, "meet", stalls)
        events.clear()
        with PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2, num_blocks=20) as over_ranks:
            assert events == ["tokenizer", "met"]
            assert over_ranks.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids == expected


@pytest.mark.slow
def test_rank_0_rehearses_before_the_others_come(tiny_path, monkeypatch):
    """Which is for kernels to be compiled, so that here, on a CPU, a small step stands for the largest."""
    from hf_paged.models import find_executor
    from hf_paged.runner.memory import rehearse

    met, is_rehearsed, meet = [], threading.Event(), ParallelGroup.meet

    def nothing(model, config):
        is_rehearsed.set()

    def small(model, config):
        met.append(has_met(model.parallel_group))
        with torch.no_grad():
            rehearse(find_executor(model)(model), PagedConfig(max_num_seqs=4, max_num_batched_tokens=64), 100)
        met.append(has_met(model.parallel_group))
        is_rehearsed.set()

    def late(self, device, store=None):
        assert is_rehearsed.wait(60)
        meet(self, device, store)

    made = []
    monkeypatch.setattr(ParallelGroup, "meet", late)
    for step in (nothing, small):
        is_rehearsed.clear()
        monkeypatch.setattr(locked_core, "rehearse", step)
        with PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2, num_blocks=20) as over_ranks:
            made.append(over_ranks.generate([[5, 6, 7], [8]], max_new_tokens=6)[0].token_ids)
    assert made[0] == made[1]
    assert met == [False, False]


@pytest.mark.slow
def test_a_worker_that_dies_while_rank_0_loads(tiny_path, monkeypatch):
    """Rank 0 does not read to the end before it says so."""
    fill, filled = checkpoint._fill, []

    def slowly(target, source):
        if not filled:
            os.kill(max(children() - before), signal.SIGKILL)
        filled.append(target)
        time.sleep(0.5)
        fill(target, source)

    monkeypatch.setattr(checkpoint, "_fill", slowly)
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 1 << 10)
    before = children()
    start = time.monotonic()
    with nothing_left(), pytest.raises(WorkerDiedError, match=r"rank 1 of 2 .*SIGKILL"):
        PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2)
    assert time.monotonic() - start < SOON
    assert filled


@pytest.mark.slow
def test_rank_0_s_own_errors_while_the_others_start(tiny_path, tmp_path, monkeypatch):
    """A bad checkpoint, an unreadable tokenizer, Ctrl-C: that error, and no process. The next generator works."""
    for file in Path(tiny_path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with nothing_left(), pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2)
    (tmp_path / "model.safetensors").unlink()
    with nothing_left(), pytest.raises(FileNotFoundError):
        PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2)

    def interrupted(path, loading):
        signal.raise_signal(signal.SIGINT)

    def unreadable(path, loading):
        raise OSError("tokenizer.json: no JSON")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for wrong, error in ((interrupted, KeyboardInterrupt), (unreadable, OSError)):
            monkeypatch.setattr(generator, "tokenizer_of", wrong)
            with nothing_left(), pytest.raises(error):
                PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    with nothing_left(), PagedGenerator.from_pretrained(tiny_path, tensor_parallel_size=2, num_blocks=20) as over_ranks:
        assert len(over_ranks.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids) == 4
