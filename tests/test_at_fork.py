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
# Why a child never waits for one of these; all others are a `ProcessLock` or a `ProcessCondition`.
_RANKS = "a child never comes to it: every way there compares os.getpid() with the owner's first"
_SERVER = "the server's event loop is the parent's: a child serves nobody"
_CUDA = "only held around work on CUDA, which no child can do"
SAFE = {
    "hf_paged.engine.structured.mask_maker.MaskMaker.begin": "of one call, whose thread no child has",
    "hf_paged.engine.structured.grammars.Grammars.begin": "of one caller, whom the child forgets with its thread",
    "hf_paged.integration.async_calls.AsyncSink._changed": "the event loop whose task waits for it is the parent's",
    "hf_paged.integration.async_calls.AsyncCalls._planned": "the event loop whose task waits for it is the parent's",
    "hf_paged.observe.progress.Progress._is_running": "a child only releases it, and its thread is the parent's",
    "hf_paged.server.completions.all_outputs": _SERVER,
    "hf_paged.server.generation.Generation._stock_outputs": _SERVER,
    "hf_paged.server.lifetime.Exchange.over": _SERVER,
    "hf_paged.server.lifetime.OpenAnswers.one": _SERVER,
    "hf_paged.server.lifetime._Client._messages": _SERVER,
    "hf_paged.kernels.build.compiling.Kernel._reading": _CUDA,
    "hf_paged.kernels.build.compile_process._few_at_a_time": _CUDA,
    "hf_paged.models.derivation.over_ranks._Meeting._barrier": "of threads that a child does not have",
    "hf_paged.models.proof.interface.ProofThread.stopped": "of a thread that a child does not have",
    "hf_paged.kernels.build.compiling._begin_ahead": _CUDA,
    "hf_paged.kernels.build.compiling._lock": _CUDA,
    "hf_paged.device.cuda.captures": _CUDA,
    "hf_paged.parallel.launch._State.lock": _RANKS,
    "hf_paged.parallel.launch._State.closing": _RANKS,
    "hf_paged.parallel.launch._State.died": _RANKS,
    "hf_paged.parallel.launch._leave": _RANKS,
    "hf_paged.parallel.launch.Workers.meeting": _RANKS,
    "hf_paged.parallel.worker.WorkerProcess.ended": _RANKS,
    "hf_paged.parallel.worker.WorkerProcess._lock": _RANKS,
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
    return {name for name in found if not name.startswith("hf_paged.process_lock.")}


def _run(case: str) -> None:
    """Run a case, whose children all have to end well."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(ROOT / "tests/fork_script.py"), case], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS"))
    assert set(line.split()[1:]) == {"0"}, line + "\n" + done.stderr


def test_every_lock_is_renewed_in_the_child_or_said_to_be_safe():
    """Locks are found in the code; those of a process are held by another thread at a fork, and free in the child."""
    found = _locks_in_the_code()
    assert found == SAFE.keys(), (found - SAFE.keys(), SAFE.keys() - found)
    _run("locks")


def test_a_fork_waits_for_the_step_of_another_thread():
    _run("steps")


WHOLE = ["generic", "lockstep", "generic_lockstep", "generate_batch", "running_manager", "streamer",
         "streamer_in_lockstep"]


@pytest.mark.parametrize("case", ["fused", "idle", *(pytest.param(case, marks=pytest.mark.slow) for case in WHOLE)])
def test_a_child_of_a_process_that_generates_gives_stocks_tokens(case):
    _run(case)


@pytest.mark.slow
def test_a_child_of_a_rank_does_not_speak_to_the_others():
    _run("ranks")
