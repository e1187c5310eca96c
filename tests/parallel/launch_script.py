"""A user's script without a `__main__` guard: rank 0 of one fork a scenario, so that imports are paid once.

    python launch_script.py FOLDER SCENARIO...

Each fork writes FOLDER/SCENARIO.json (its id, its workers' ids) when it runs, FOLDER/SCENARIO.err, and its exit code as
FOLDER/SCENARIO.code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch_jobs import CPU, Follower, Half, meet, order

from hf_paged.errors import WorkerDiedError
from hf_paged.parallel.group import ARRIVED
from hf_paged.parallel.launch import launch

torch.set_num_threads(1)
folder, names = Path(sys.argv[1]), {}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background may have it ignored
for scenario in sys.argv[2:]:
    if not (child := os.fork()):
        break
    names[child] = scenario
else:
    while names:
        child, status = os.wait()
        (folder / f"{names.pop(child)}.code").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)

os.setpgid(0, 0)
os.dup2(os.open(folder / f"{scenario}.err", os.O_WRONLY | os.O_CREAT), 2)
workers = launch(2, Half() if scenario == "half" else Follower(), "cpu")


def say() -> None:
    (folder / "new").mkdir(exist_ok=True)
    ids = {"rank 0": os.getpid(), "workers": workers.processes}
    (folder / "new" / scenario).write_text(json.dumps(ids))
    (folder / "new" / scenario).rename(folder / f"{scenario}.json")


if scenario == "unmet":  # the worker dies when rank 0 already waits in init_process_group
    workers.store.set(ARRIVED.format(rank=1), b"")
    threading.Timer(1.0, os.kill, (workers.processes[0], signal.SIGKILL)).start()
    say()
if scenario == "again":  # as unmet; the thread that waits for the dead does not keep rank 0 from meeting others
    workers.store.set(ARRIVED.format(rank=1), b"")
    threading.Timer(1.0, os.kill, (workers.processes[0], signal.SIGKILL)).start()
    try:
        meet(workers)
    except WorkerDiedError:
        workers.close()
    workers = launch(2, Follower(), "cpu")
if scenario == "loading":
    with workers.meeting(CPU):
        say()
        time.sleep(60)
if scenario == "half":  # the worker dies when the default group is there, and rank 0's thread waits for ever
    say()
    try:
        meet(workers)
    except WorkerDiedError:
        assert dist.is_initialized()
    workers.close()
    assert not dist.is_initialized()
    workers = launch(2, Follower(), "cpu")
group = meet(workers)
assert order(group, "sum") == 3
if scenario != "half":
    say()
if scenario == "raises":
    raise ValueError("user code")
if scenario == "stuck":
    threading.Timer(1.0, os.kill, (workers.processes[0], signal.SIGKILL)).start()
    with workers.step():
        while True:  # stands for a kernel that waits for a dead rank: no error gets the main thread out
            time.sleep(0.1)
if scenario == "idle":  # as stuck, outside of a step
    os.kill(workers.processes[0], signal.SIGKILL)
    time.sleep(8)
    print("idle", file=sys.stderr)
while scenario in ("killed", "interrupted", "foreground"):
    with workers.step():
        order(group, "sum")
