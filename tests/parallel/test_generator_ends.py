"""However a generator over several ranks ends, its processes end with it, and the error is one and clear."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import in_child, random_prompts, tiny_model

from hf_paged import PagedGenerator, PartlyLoadedError, disable
from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.parallel import launch

pytestmark = pytest.mark.slow  # each starts ranks of its own

SOON = 10.0
VOCAB = 2600
PROMPTS = random_prompts([5, 17, 40], vocab_size=VOCAB)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(vocab_size=VOCAB).save_pretrained(folder)
    return str(folder)


def start(checkpoint, size=2):
    generator = PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=size)
    return generator, generator._workers[0].processes


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def generate_on(generator):
    while True:
        generator.generate(PROMPTS, max_new_tokens=200)


def assert_gone(processes):
    deadline = time.monotonic() + SOON
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, processes))
    assert not dist.is_initialized()


@pytest.mark.core
def test_dropping_the_generator_ends_the_ranks(checkpoint):
    generator, processes = start(checkpoint)
    gone = weakref.ref(generator)
    assert generator.generate(PROMPTS[:1], max_new_tokens=2)[0].finish_reason == "length"
    del generator
    gc.collect()
    assert gone() is None
    assert_gone(processes)


def test_a_fork_and_a_model_that_is_disabled(checkpoint):
    """A fork leaves rank 0's connections alone; what `disable` ended, `close` does not end again."""
    generator, processes = start(checkpoint)
    [expected] = generator.generate(PROMPTS[:1], max_new_tokens=4)

    def generate():
        with pytest.raises(EngineClosedError):
            generator.generate(PROMPTS[:1], max_new_tokens=4)
        generator.close()

    assert in_child(generate) == 0
    assert generator.generate(PROMPTS[:1], max_new_tokens=4)[0].token_ids == expected.token_ids
    disable(generator.model)
    generator.close()
    assert_gone(processes)


def test_a_killed_worker_and_an_interrupt(checkpoint, monkeypatch):
    """Both leave rank 0 with one error in time, and a process in which the next generator works."""
    generator, processes = start(checkpoint)
    threading.Timer(1.0, os.kill, (processes[0], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 1 of 2 .* SIGKILL"):
        generate_on(generator)
    assert time.monotonic() - begin < 1.0 + SOON
    with pytest.raises((EngineClosedError, WorkerDiedError)):
        generator.generate(PROMPTS, max_new_tokens=2)
    generator.close()
    assert_gone(processes)

    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2) as generator:
        processes = generator._workers[0].processes
        expected = [completion.token_ids for completion in generator.generate(PROMPTS, max_new_tokens=8)]
        runner = generator.engine._core.pool.runner
        launch, calls = runner.launch, []

        def interrupted(*args):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return launch(*args)

        monkeypatch.setattr(runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.generate(PROMPTS, max_new_tokens=8)
        assert_gone(processes)  # without close(): a notebook's user may never call it
        with pytest.raises(EngineClosedError, match="expected a new PagedGenerator"):
            generator.generate(PROMPTS, max_new_tokens=8)
        with pytest.raises(EngineClosedError):
            generator.engine.reset_prefix_cache()

    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2) as generator:
        assert [completion.token_ids for completion in generator.generate(PROMPTS, max_new_tokens=8)] == expected
        with pytest.raises(ValueError, match="close the other PagedGenerator"):
            PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2)
        [process] = generator._workers[0].processes
        os.kill(process, signal.SIGKILL)
        assert generator._workers[0]._state.died.wait(SOON)
        engine = generator.engine
    assert engine.stats().num_blocks == 0  # closing frees everything, and has no news for anybody
    assert_gone([process])


def test_a_worker_that_dies_while_weights_are_loaded(checkpoint):
    """The loader's own code is no step, and may take longer than rank 0 has to get out of one."""
    generator, [process] = start(checkpoint)
    state = tiny_model(vocab_size=VOCAB).state_dict()

    def weights():
        for i, item in enumerate(state.items()):
            if i == 3:
                os.kill(process, signal.SIGKILL)
                time.sleep(launch._STUCK + 1)
            yield item

    with pytest.raises(PartlyLoadedError, match="SIGKILL") as caught:
        generator.load_weights(weights())
    assert isinstance(caught.value.__cause__, WorkerDiedError)
    assert caught.value.written == tuple(state)[:3]
    with pytest.raises((EngineClosedError, WorkerDiedError)):
        next(generator.named_weights())
    generator.close()
    assert_gone([process])


class Graphs:
    """Of steps that no graph holds."""

    num_captured, dropped_by = 0, {}

    def check(self):
        pass

    def is_current(self):
        return True

    def is_ready(self, plan):
        return False

    def launch(self, *_, num_logits):
        return None


class Nccl:
    """Aborts as NCCL does: it waits for the end of the graphs that hold its kernels."""

    def __init__(self, monkeypatch, generator, patience):
        self.began, self.dropped, self.patience, self.waits = threading.Event(), threading.Event(), patience, []
        self.state, self.runner = generator._workers[0]._state, generator.engine._core.pool.runner
        self.state.device_type = "cuda"
        self.graphs = self.runner.graphs = Graphs()
        self.graphs.drop = lambda reason: self.dropped.set()
        generator.engine.group.holds(self.graphs)
        self.own_abort = launch._abort_process_group
        monkeypatch.setattr(launch, "_abort_process_group", self.abort)

    def abort(self):
        self.began.set()
        self.waits.append((self.dropped.wait(self.patience), threading.current_thread()))
        self.own_abort()

    def end(self):
        self.dropped.set()
        if self.state.aborted is not None:
            assert self.state.aborted.wait(SOON)


@pytest.fixture
def nccl(checkpoint, monkeypatch):
    """A generator, the process of rank 1, and an `Nccl`, on CPUs."""
    generator, [process] = start(checkpoint)
    stand_in = Nccl(monkeypatch, generator, SOON)
    yield generator, process, stand_in
    stand_in.end()
    generator.close()
    assert_gone([process])


@pytest.mark.parametrize("how", ["killed in a step", "close", "killed while idle", "interrupt", "close in a step"])
def test_graphs_end_before_their_communicators(nccl, monkeypatch, how):
    """Else rank 0 waited for itself for ever, or ended with SIGABRT because of a thread that still waited."""
    generator, process, stand_in = nccl
    begin = time.monotonic()
    if how == "killed in a step":
        threading.Timer(0.5, os.kill, (process, signal.SIGKILL)).start()
    elif how == "killed while idle":
        os.kill(process, signal.SIGKILL)
        # A step may wait in NCCL's kernels, which end with nothing else.
        assert stand_in.began.wait(SOON) and not stand_in.dropped.is_set()
    elif how == "interrupt":
        monkeypatch.setattr(stand_in.runner, "launch", ctrl_c)
    elif how == "close in a step":
        monkeypatch.setattr(stand_in.graphs, "launch", lambda *_, **__: generator.close())
    if how == "close":
        generator.close()
    else:
        with pytest.raises(ERRORS.get(how, WorkerDiedError)):
            generate_on(generator)
    assert time.monotonic() - begin < launch._ABORT
    [(before, thread)] = stand_in.waits
    assert before and thread is not threading.main_thread()
    with pytest.raises(RuntimeError, match="or has left them"):
        _ = generator.engine.group.hosts
    assert_gone([process])


def ctrl_c(*_):
    raise KeyboardInterrupt


ERRORS = {"interrupt": KeyboardInterrupt, "close in a step": EngineClosedError}


def test_communicators_that_do_not_end_do_not_keep_rank_0(nccl, checkpoint):
    generator, process, stand_in = nccl
    stand_in.graphs.drop = lambda reason: None
    begin = time.monotonic()
    generator.close()
    assert launch._ABORT <= time.monotonic() - begin < SOON and not stand_in.dropped.is_set()
    assert not is_alive(process)
    assert launch.is_leading()
    with pytest.raises(ValueError, match="expected no default process group"):  # and not a wait for other ranks
        start(checkpoint)
    stand_in.end()
    assert not launch.is_leading()


def test_a_bad_checkpoint_is_one_error_and_no_process(checkpoint, tmp_path):
    for file in Path(checkpoint).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = children()
    with pytest.raises((ValueError, WorkerDiedError), match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2)
    assert_gone(children() - before)


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


SCRIPT = """
import signal, sys
from hf_paged import PagedGenerator
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this one
generator = PagedGenerator.from_pretrained(sys.argv[1], tensor_parallel_size=2)  # no __main__ guard
print("pids", *generator._workers[0].processes, flush=True)
[made] = generator.generate([[5, 6, 7]], max_new_tokens=4)
print("tokens", *made.token_ids, flush=True)
while sys.argv[2] == "run on":
    generator.generate([[5, 6, 7]] * 3, max_new_tokens=300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "run on"])
def test_a_plain_script(checkpoint, tmp_path, how):
    """Without a __main__ guard; ends by itself, or by Ctrl-C in a step: no process is left. (More: test_launch.)"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), checkpoint, how], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    pids = [int(word) for word in process.stdout.readline().split()[1:]]
    tokens = process.stdout.readline()
    if how == "run on":
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert len(pids) == 1 and len(tokens.split()) == 5
    if how == "end":
        assert process.returncode == 0 and "Traceback" not in errors
    else:
        assert process.returncode != 0 and "KeyboardInterrupt" in errors and errors.count("Traceback") <= 2
    assert_gone(pids)


TORCHRUN = """
import sys, torch, torch.distributed as dist, warnings
import hf_paged
from hf_paged import PagedGenerator
from hf_paged.parallel.group import join
from hf_paged.parallel.loading import load

prompts = [[5, 6, 7], [9] * 20]
with PagedGenerator.from_pretrained(sys.argv[1], tensor_parallel_size=2) as generator:
    made = generator.generate(prompts, max_new_tokens=6)
    sampled = generator.generate(prompts, max_new_tokens=6, do_sample=True, temperature=2.0, seed=4)
    streamed = [output.new_token_ids for _, output in generator.stream(prompts[:1], max_new_tokens=6)]
    rank = dist.get_rank()
    assert (made is None) == (sampled is None) == (streamed == []) == (rank > 0)

torch.manual_seed(100 + rank)  # each rank draws another seed: rank 0's counts
model = load(sys.argv[1], join(rank, 2, torch.device("cpu")), device="cpu")
with torch.no_grad():
    stock = model.generate(torch.tensor(prompts[1:]), max_new_tokens=6, do_sample=False)
hf_paged.enable(model)
assert hf_paged.get_engine(model).group.size == 2
with warnings.catch_warnings():
    warnings.simplefilter("error", hf_paged.FallbackWarning)
    native = model.generate(torch.tensor(prompts[1:]), max_new_tokens=6, do_sample=False)
    drawn = model.generate(torch.tensor(prompts[1:]), max_new_tokens=6, do_sample=True, temperature=2.0)
assert torch.equal(native, stock)
every = [None, None]
dist.all_gather_object(every, drawn.tolist())
assert every[0] == every[1]
try:
    model.generate_batch([[5, 6, 7]])
    raise SystemExit("generate_batch went on")
except hf_paged.UnsupportedModelError as error:
    assert "PagedGenerator on every rank" in str(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    beams = model.generate(torch.tensor(prompts[1:]), max_new_tokens=6, num_beams=2, do_sample=False)
assert any("sharded over several ranks" in str(w.message) for w in caught), [str(w.message) for w in caught]
hf_paged.disable(model)
assert torch.equal(beams, model.generate(torch.tensor(prompts[1:]), max_new_tokens=6, num_beams=2, do_sample=False))
if rank == 0:
    print("TOKENS", [c.token_ids for c in made], [c.token_ids for c in sampled], sum(streamed, []), flush=True)
left_open = PagedGenerator.from_pretrained(sys.argv[1], tensor_parallel_size=2)
left_open.generate(prompts, max_new_tokens=2)
dist.barrier()
dist.destroy_process_group()
try:
    left_open.generate(prompts, max_new_tokens=2)
    raise SystemExit("generate went on without a process group")
except RuntimeError as error:
    assert "has left them" in str(error)
"""


@pytest.mark.slow
def test_torchrun(checkpoint, tmp_path):
    """Every rank runs the script: rank 0 gets the results; an enabled model generates on all of them alike."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    made = subprocess.run([*command, checkpoint], capture_output=True, text=True, timeout=240,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert made.returncode == 0, made.stdout + made.stderr[-6000:]
    with PagedGenerator.from_pretrained(checkpoint) as alone:
        prompts = [[5, 6, 7], [9] * 20]
        greedy = [c.token_ids for c in alone.generate(prompts, max_new_tokens=6)]
        sampled = alone.generate(prompts, max_new_tokens=6, do_sample=True, temperature=2.0, seed=4)
    assert f"TOKENS {greedy} {[c.token_ids for c in sampled]} {greedy[0]}" in made.stdout
