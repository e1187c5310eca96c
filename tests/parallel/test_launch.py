"""Workers come, follow and go with rank 0, whichever of them ends first and however."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist
from launch_jobs import CPU, Follower, Meeting, children, meet, order
from support import in_child

from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.parallel.group import ARRIVED, ENVIRONMENT, ParallelGroup
from hf_paged.parallel.launch import Workers, _meet, _State, launch

HERE = Path(__file__).parent
SOON = 10.0


def alive(process: int) -> bool:
    """Is there such a process? A zombie is one."""
    return Path(f"/proc/{process}").exists()


def listening() -> set[str]:
    """Inodes of this process's listening TCP sockets."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        own.add(target.removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    return {row[9] for row in rows if row[3] == "0A"} & own


def within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


@pytest.fixture
def clean():
    """Yields; afterwards no child process, socket, process group, thread or shared memory is left."""
    shared = set(os.listdir("/dev/shm"))
    before, sockets = children(), listening()
    yield
    gc.collect()
    assert children() <= before
    assert listening() <= sockets
    assert not dist.is_initialized()
    assert within(2.0, lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("hf_paged-")])
    assert set(os.listdir("/dev/shm")) <= shared


def test_workers_follow_and_return(clean, capfd):
    """Sums over three ranks; told to end, all end with 0; a second set of workers fails with the words of its job."""
    workers = launch(3, Follower(), "cpu")
    group = meet(workers)
    assert [os.getsid(process) for process in workers.processes] == workers.processes
    with workers.step():
        assert order(group, "speak") == 6
        order(group, "end")
    with pytest.raises(ValueError, match="expected no default process group"):
        launch(2, Follower(), "cpu")
    workers.close(SOON)
    workers.close()
    assert [worker.process.returncode for worker in workers._state.workers] == [0, 0]
    with pytest.raises(EngineClosedError):
        workers.check()
    said = capfd.readouterr()
    assert "out of" not in said.out
    assert "[rank 1] out of 1\n" in said.err and "[rank 2] out of 2\n" in said.err

    workers = launch(2, Follower(), "cpu")
    group = meet(workers)
    message = r"(?s)rank 1 of 2 .*exit code 1:.*no such tensor: lm_head.weight$"
    with pytest.raises(WorkerDiedError, match=message), workers.step():
        order(group, "raise")
    with pytest.raises(WorkerDiedError, match="lm_head"):
        workers.check()
    workers.close()


def test_a_death_just_before_a_step(clean):
    """The watcher, which ends a rank 0 that is stuck in a step, saw none: the step must not begin."""
    state = _State(2, dist.HashStore(), "cpu")
    workers, steps = Workers(state), []

    class DiesAfterTheFirstLook(threading.Event):
        def is_set(self):
            steps.append(state.step)
            return len(steps) > 1

    state.died, state.exit_report = DiesAfterTheFirstLook(), "rank 1 of 2 ended"
    with pytest.raises(WorkerDiedError, match="rank 1 of 2 ended"), workers.step():
        pytest.fail("rank 0 would wait for ever in here")
    assert steps[0] is None and steps[1] is not None
    workers.close()


def test_a_meeting_that_fails_after_its_close_leaves_later_groups_alone():
    """It may come half an hour later, when torch's timeout is over and the process is in another group."""
    state, met = _State(2, dist.HashStore(), "cpu"), Future()
    state.store.set(ARRIVED.format(rank=1), b"")
    state.closing.set()
    state.closed = True

    class TimesOut(ParallelGroup):
        def meet(self, device, store=None):
            raise TimeoutError("no answer")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _meet(state, TimesOut(0, 2), CPU, met)
        assert dist.is_initialized() and isinstance(met.exception(), TimeoutError)
    finally:
        dist.destroy_process_group()


def test_a_killed_worker_ends_the_collective(clean):
    """Rank 2 dies while rank 0 waits for it: the error names it, and rank 1, which waits too, is ended."""
    workers = launch(3, Follower(), "cpu")
    group = meet(workers)
    threading.Timer(1.0, os.kill, (workers.processes[1], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"(?s)rank 2 of 3 .*SIGKILL:\nhangs"), workers.step():
        order(group, "hang")
    assert time.monotonic() - start < SOON
    assert within(SOON, lambda: not any(map(alive, workers.processes)))
    workers.close()


@pytest.mark.slow
def test_communicators_end_where_no_thread_can_be_started(clean, monkeypatch):
    """As when the interpreter of Python 3.12.1 ends."""
    workers = launch(2, Follower(), "cpu")
    meet(workers)
    workers._state.device_type = "cuda"
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name != "hf_paged-abort":
            return start(thread)
        refused.append(thread)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    workers.close()
    assert refused and not dist.is_initialized()


@pytest.mark.slow
def test_workers_that_never_meet(clean):
    """A job that raises before it meets rank 0, and a worker killed at once: `meeting` raises. A dropped one ends."""
    failing = launch(2, Follower("no file model.safetensors"), "cpu")
    killed, dropped = launch(3, Follower(), "cpu"), launch(2, Follower(), "cpu")
    processes = dropped.processes
    del dropped
    assert not any(map(alive, processes))
    os.kill(killed.processes[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"rank 1 of 3 .*SIGKILL"):
        meet(killed)
    killed.close()
    with pytest.raises(WorkerDiedError, match=r"(?s)rank 1 of 2 .*OSError: no file model.safetensors$"):
        meet(failing)
    failing.close()
    with pytest.raises(ValueError, match="size=1: expected at least 2"):
        launch(1, Follower(), "cpu")
    with pytest.raises(ValueError, match="GPUs"):
        launch(1000, Follower(), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "words"), [
    ("meeting", "OSError: no route to rank 0"),
    ("loading", "ValueError: no such tensor: lm_head.weight"),
])
def test_a_worker_that_fails_while_it_meets(clean, failing, words):
    """Whichever of its threads fails, the other does not hold the process; rank 0 hears of it in whatever it does."""
    workers = launch(2, Meeting(failing), "cpu")

    def meanwhile() -> None:
        with workers.meeting(CPU):
            assert workers._state.died.wait(60)
            workers.check()

    with pytest.raises(WorkerDiedError, match=rf"(?s)rank 1 of 2 .*exit code 1:.*{words}$") as caught:
        meanwhile()
    assert str(caught.value).count("Traceback") == 1
    with pytest.raises(WorkerDiedError, match=words):
        meet(workers)
    workers.close()


@pytest.mark.slow
def test_errors_of_what_runs_while_the_ranks_meet(clean):
    """They come as they are, and leave nothing behind; the environment and the hook are the user's again."""
    environment, hook = dict(os.environ), sys.excepthook

    def meanwhile(error: BaseException) -> None:
        with workers.meeting(CPU) as group:
            assert (group.rank, group.size) == (0, 2)
            raise error

    for error in (ValueError("no such tensor"), KeyboardInterrupt()):
        workers = launch(2, Follower(), "cpu")
        processes = workers.processes
        with pytest.raises(type(error)) as caught:
            meanwhile(error)
        assert caught.value is error
        workers.close()
        assert not any(map(alive, processes))
    assert {**ENVIRONMENT, **environment} == dict(os.environ) and sys.excepthook is hook


@pytest.mark.slow
def test_a_dropped_reference_ends_workers_that_met(clean):
    workers = launch(2, Follower(), "cpu")
    group = meet(workers)
    assert order(group, "sum") == 3

    def leave():
        gc.collect()
        workers.close(1.0)  # a fork's: not its workers

    assert in_child(leave) == 0
    processes = workers.processes
    assert all(map(alive, processes))
    workers = None
    assert not any(map(alive, processes))


@pytest.mark.slow
def test_scripts_that_end_in_every_way(tmp_path):
    """Rank 0 is a script: killed, interrupted (alone, and with its foreground group), failed, stuck, at its end."""
    scenarios = ["killed", "interrupted", "foreground", "loading", "raises", "stuck", "idle", "unmet", "again", "half",
                 "ends"]
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    script = subprocess.Popen([sys.executable, HERE / "launch_script.py", tmp_path, *scenarios],
                              env={**os.environ, "PYTHONPATH": path})
    started: dict[str, dict] = {}

    def read(scenario: str) -> bool:
        file = tmp_path / f"{scenario}.json"
        if file.exists():
            started[scenario] = json.loads(file.read_text())
        return file.exists()

    try:
        assert within(180, lambda: all(map(read, scenarios)))
        for scenario, end in {"killed": signal.SIGKILL, "interrupted": signal.SIGINT, "loading": signal.SIGINT}.items():
            os.kill(started[scenario]["rank 0"], end)
        os.killpg(started["foreground"]["rank 0"], signal.SIGINT)
        workers = [process for scenario in scenarios for process in started[scenario]["workers"]]
        assert within(SOON, lambda: not any(map(alive, workers)))
        script.wait(2 * SOON)
    finally:
        script.kill()
        for processes in started.values():
            for process in [processes["rank 0"], *processes["workers"]]:
                if alive(process):
                    os.kill(process, signal.SIGKILL)
        script.wait()
    codes = {scenario: int((tmp_path / f"{scenario}.code").read_text()) for scenario in scenarios}
    errors = {scenario: (tmp_path / f"{scenario}.err").read_text() for scenario in scenarios}
    interrupted = {codes.pop(scenario) for scenario in ("interrupted", "foreground", "loading")}
    assert interrupted <= {1, -signal.SIGINT}
    expected = {"killed": -9, "raises": 1, "stuck": 1, "idle": 0, "unmet": 1, "again": 0, "half": 0, "ends": 0}
    assert codes == expected, errors
    for scenario in ("interrupted", "foreground", "loading"):
        assert errors[scenario].rstrip().endswith("KeyboardInterrupt") and "[rank" not in errors[scenario]
    assert errors["raises"].rstrip().endswith("ValueError: user code")
    assert "rank 1 of 2" in errors["stuck"] and "ending rank 0" in errors["stuck"]
    assert errors["idle"] == "idle\n"
    assert "WorkerDiedError: rank 1 of 2" in errors["unmet"]
    assert errors["ends"] == ""
