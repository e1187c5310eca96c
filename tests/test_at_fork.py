"""`os.fork` while other threads generate: the child, which has none of them, generates right tokens and hangs nowhere.

Every case is a process of its own (fork_script.py), so that pytest is not forked.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

# What another thread may hold, or what only another thread sets.
LOCKS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Queue", "LifoQueue",
         "PriorityQueue", "Future", "cached_property"}
# `torch.cuda.Event` is none of them.
_ELSEWHERE = {"torch.cuda.Event"}
RENEWED = {
    "hf_paged._importing",
    "hf_paged.engine.call_counts.CallCounts._lock",
    "hf_paged.engine.driver.Driver._changed",
    "hf_paged.engine.engine_registry._lock",
    "hf_paged.engine.fair_lock.FairLock.rlock",
    "hf_paged.engine.form_compilers.FormCompilers._lock",
    "hf_paged.engine.grammars.Grammars._lock",
    "hf_paged.engine.grammars.Grammars._reading",
    "hf_paged.integration.continuous_batching.board.RequestBoard.changed",
    "hf_paged.integration.explain._one_at_a_time",
    "hf_paged.integration.hooks.lock",
    "hf_paged.integration.install._enabling_one",
    "hf_paged.integration.late_cache._Call.computing",
    "hf_paged.models.paged_calls._lock",
    "hf_paged.models.replica.Replica._meeting",
    "hf_paged.observe.registry._lock",
    "hf_paged.observe.trace_file.TraceFile._lock",
}
# Of those that stay as they are: why a child never waits for one.
_RANKS = "a child never comes to it: every way there compares os.getpid() with the owner's first"
_SERVER = "the server's event loop is the parent's: a child serves nobody"
_CUDA = "only held around work on CUDA, which no child can do"
SAFE = {
    "hf_paged.engine.frozen_heap.FrozenHeap._lock": "no thread waits for it: where it is taken, nothing is frozen",
    "hf_paged.engine.mask_maker.MaskMaker.begin": "of one call, whose thread no child has",
    "hf_paged.engine.grammars.Grammars.begin": "of one caller, whom the child forgets with its thread",
    "hf_paged.engine.driver.DrivenCall._changed": "the event loop whose task waits for it is the parent's",
    "hf_paged.integration.async_calls.AsyncCalls._compiled": "the event loop whose task waits for it is the parent's",
    "hf_paged.integration.progress.Progress._is_running": "a child only releases it, and its thread is the parent's",
    "hf_paged.server.answers.Answer._pieces": _SERVER,
    "hf_paged.server.calls.ServedCall._settled": _SERVER,
    "hf_paged.server.calls.ServedCall.over": _SERVER,
    "hf_paged.server.ending.OpenAnswers.one": _SERVER,
    "hf_paged.server.http._Answer._refuse": _SERVER,
    "hf_paged.server.http._Answer.refused": _SERVER,
    "hf_paged.server.http._Client._messages": _SERVER,
    "hf_paged.kernels.build.compiling.Kernel._reading": _CUDA,
    "hf_paged.kernels.build.compile_process._one_at_a_time": _CUDA,
    "hf_paged.kernels.build.compiling._begin_ahead": _CUDA,
    "hf_paged.kernels.build.compiling._lock": _CUDA,
    "hf_paged.kernels.build.compiling.compiled_ahead": "done before anybody else sees it",
    "hf_paged.device.captures.captures": _CUDA,
    "hf_paged.parallel.launch._State.lock": _RANKS,
    "hf_paged.parallel.launch._State.closing": _RANKS,
    "hf_paged.parallel.launch._State.died": _RANKS,
    "hf_paged.parallel.launch._leave": _RANKS,
    "hf_paged.parallel.launch.Workers.meeting": _RANKS,
    "hf_paged.parallel.process.WorkerProcess.ended": _RANKS,
    "hf_paged.parallel.process.WorkerProcess._lock": _RANKS,
}


class _Locks(ast.NodeVisitor):
    """Where locks are made: module.name, module.Class.attribute, or the function that makes one for anything else."""

    def __init__(self, module: str) -> None:
        self.found: set[str] = set()
        self._path = [module]

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        pairs = [(target, node.value) for target in targets if node.value is not None]
        elements = [*getattr(targets[0], "elts", ()), *getattr(node.value, "elts", ())]
        is_starred = any(isinstance(element, ast.Starred) for element in elements)
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) and not is_starred:
            pairs = list(zip(targets[0].elts, node.value.elts, strict=True))
        for name, value in pairs:
            if not any(map(self._is_lock, ast.walk(value))):
                continue
            if isinstance(name, ast.Attribute) and self._path[-1] == "__init__":
                self.found.add(".".join([*self._path[:-1], name.attr]))
            elif len(self._path) == 1 and isinstance(name, ast.Name):
                self.found.add(f"{self._path[0]}.{name.id}")
            else:
                self.found.add(".".join(self._path))

    visit_Assign = visit_AnnAssign = _visit_assignment

    def visit_Call(self, node: ast.Call) -> None:  # one that no assignment holds
        if self._is_lock(node):
            self.found.add(".".join(self._path))
        self.generic_visit(node)

    @staticmethod
    def _is_lock(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func  # Future[None]()
        return ast.unparse(function).split(".")[-1] in LOCKS and ast.unparse(function) not in _ELSEWHERE


def _locks_in_the_code() -> set[str]:
    found = set()
    for path in sorted((ROOT / "hf_paged").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        visitor = _Locks(module)
        visitor.visit(tree)
        found |= visitor.found
    return {name for name in found if name.rpartition(".")[2] not in ("after_fork_in_child", "_renew_in_child")}


def _run(case: str) -> list[str]:
    """What a case printed, line by line."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(ROOT / "tests/fork_script.py"), case], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS"))
    assert set(line.split()[1:]) == {"0"}, line + "\n" + done.stderr
    return done.stdout.splitlines()


def test_every_lock_is_renewed_in_the_child_or_said_to_be_safe():
    """Locks are found in the code; those to be renewed are held by another thread at a fork, and free in the child."""
    found = _locks_in_the_code()
    assert found == RENEWED | SAFE.keys(), (found - RENEWED - SAFE.keys(), (RENEWED | SAFE.keys()) - found)
    tried = next(line for line in _run("locks") if line.startswith("LOCKS")).split()[1:]
    assert set(tried) == RENEWED


WHOLE = ["generic", "lockstep", "generic_lockstep", "generate_batch", "running_manager", "streamer",
         "streamer_in_lockstep", "idle"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fused", *(pytest.param(case, marks=pytest.mark.slow) for case in WHOLE)])
def test_a_child_of_a_process_that_generates_gives_stocks_tokens(case):
    _run(case)


@pytest.mark.slow
def test_a_child_of_a_rank_does_not_speak_to_the_others():
    _run("ranks")
