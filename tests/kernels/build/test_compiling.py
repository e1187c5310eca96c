"""Kernels that a piece of work misses are compiled side by side, and launched as they would be without that.

Each case runs in a process of its own, where Triton compiles for a GPU that is not there (`compiling_script.py`); all
are forks of one that has imported torch and Triton.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_paged
from hf_paged.kernels.build import compiling, kernel_log

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")
SCRIPT = Path(__file__).with_name("compiling_script.py")
PACKAGE = Path(hf_paged.__file__).parent


def environment():
    """Of scripts: Triton does not interpret there, and they import the package and what tests share."""
    paths = [str(PACKAGE.parent), str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return given | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of a case, by its name."""
    errors = tmp_path_factory.mktemp("script") / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen([sys.executable, SCRIPT], env=environment(), stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=stderr, text=True)

    @cache
    def carry_out(name):
        print(name, tmp_path_factory.mktemp("cache"), file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, errors.read_text()
        return json.loads(line)

    with process:
        yield carry_out
        process.stdin.close()


def threads_of(case):
    return {thread.rpartition("_")[0] for _, thread, _ in case["compiled"]}


def test_what_is_missing_is_compiled_in_threads_and_launched_once(found):
    case = found("launches")["nothing known"]
    assert sorted(name for name, *_ in case["compiled"]) == ["plus_one", "twice"]
    assert threads_of(case) == {"hf_paged-compile"}
    assert (case["result"], case["launched"], case["calls"]) == ("done", ["twice", "plus_one"], 3)


def test_work_whose_kernels_are_compiled_runs_once(found):
    case = found("launches")["all known"]
    assert (case["compiled"], case["launched"], case["calls"]) == ([], ["twice", "plus_one"], 1)


def test_nothing_is_launched_between_a_missing_kernel_and_the_last_run(found):
    """A compiled kernel behind the missing one would read what nobody wrote."""
    assert found("launches")["one known"]["launched"] == ["twice", "twice", "plus_one"]


def test_work_to_which_other_ranks_come_is_never_broken_off(found):
    """Whatever is missing, there is a dry run and a real one, which alone comes to the other ranks."""
    missed, known = (found("with_others")[name] for name in ("nothing known", "all known"))
    assert threads_of(missed) == {"hf_paged-compile"} and known["compiled"] == []
    for case in (missed, known):
        assert (case["result"], case["launched"], case["calls"]) == ("done", ["twice", "plus_one"], 2)


def test_a_kernel_is_read_at_its_first_use(found):
    assert found("launches")["read"] == [True, True, False]


def test_in_the_dry_run_new_tensors_are_zeros(found):
    _, dry, _ = found("zeros")["zeros"]
    assert dry == [True, True]


def test_a_kernel_that_does_not_compile_raises_at_its_launch_every_time(found):
    cases = found("failures")
    for name in ("does not compile", "again"):
        assert (cases[name]["error"], cases[name]["launched"][-1]) == ("CompilationError", "twice"), name


def test_an_error_of_the_work_is_the_last_runs_and_leaves_no_thread_dry(found):
    cases = found("failures")
    assert (cases["raises"]["error"], cases["raises"]["launched"]) == ("ValueError", ["twice"])
    assert cases["after that"]["launched"][-2:] == ["twice", "plus_one"]


def test_another_threads_launches_are_launches(found):
    """Behind the kernel in the dry run and in the last one: the first ends where the kernel is missed."""
    assert found("others")["threads"] == [["twice"], ["twice"]]


def test_kernels_of_others_are_compiled_and_launched_as_ever(found):
    """But for the first run, which ends where they are missed: the dry one launches them."""
    case = found("others")["library"]
    assert case["launched"] == ["another_librarys", "another_librarys", "plus_one"]
    assert [name for name, thread, _ in case["compiled"] if thread == "MainThread"] == ["another_librarys"]


def test_what_comes_later_is_compiled_while_the_work_waits_and_not_launched(found):
    case = found("later")
    assert case["launched"] == ["twice"]
    assert sorted(name for name, *_ in case["compiled"]) == ["plus_one", "plus_one", "twice"]
    assert case["coming"] == [1, 1]
    assert (case["then"]["compiled"], case["then"]["launched"]) == ([], ["plus_one"])


def test_what_comes_later_is_left_alone_where_nothing_is_missing(found):
    assert found("later")["known"]["compiled"] == []


def test_inside_of_another_call_the_work_just_runs(found):
    case = found("nested")
    assert (case["result"], case["launched"]) == ("done", ["twice", "plus_one"])


def test_a_kernel_that_is_under_way_for_one_device_is_compiled_for_another_as_well(found):
    """What a kernel was loaded to is one device: the other's launches are not to share the object."""
    case = found("devices")
    assert case["kernels"] == 2
    assert (threads_of(case), case["launched"]) == ({"hf_paged-compile"}, ["plus_one"])


def test_a_kernel_is_put_in_its_place_once(found):
    """By the thread that waits for it, or by the one that compiled it."""
    assert sorted(found("hook")["told"]) == ["plus_one", "twice"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_child_of_a_process_that_prepares_triton_prepares_it_itself(found):
    """Nothing of CUDA may have begun by then, so that the child can do with it what it wants."""
    assert found("fork") == {"begun": True, "status": 0}


@pytest.mark.parametrize("at", ["set", "inside"])
def test_an_interrupt_leaves_no_mode_behind(monkeypatch, at):
    """Else every later kernel that this thread misses would end its call."""
    own = compiling.active_mode

    def interrupted(mode):
        token = own.set(mode)
        if mode is not None and at == "set":
            raise KeyboardInterrupt
        return token

    monkeypatch.setattr(compiling, "active_mode", SimpleNamespace(get=own.get, set=interrupted, reset=own.reset))
    with pytest.raises(KeyboardInterrupt), compiling._submits_to(compiling._Watch()):
        raise KeyboardInterrupt
    assert own.get() is None


def test_a_later_process_finds_on_the_disk_what_threads_compiled(found):
    """The variant that a thread compiles is the very one that a launch asks for."""
    case = found("disk")
    assert threads_of(case) == {"hf_paged-compile"}
    assert case["anew"] == [["twice", "MainThread", True], ["plus_one", "MainThread", True]]


def test_what_launches_a_kernel_is_made_by_threads_and_loaded_by_none_of_them(found):
    """Triton 3.6 has a C compiler make it, for which a launch would wait; loaded, one would take another's place."""
    for case in (found("disk"), found("ahead")["missing"]):
        made, loaded = ([kernel for kernel, thread in case[what] if thread.startswith("hf_paged-compile")]
                        for what in ("made", "loaded"))
        assert (sorted(made), loaded) == (["plus_one", "twice"], [])


def test_who_compiles_needs_no_c_compiler(found):
    case = found("no_c_compiler")
    assert (case["result"], case["error"], case["launched"]) == ("done", None, ["twice", "plus_one"])
    assert case["ahead"] is None
    tried = [kernel for kernel, thread in case["tried"] if thread.startswith("hf_paged-compile")]
    assert sorted(tried) == ["another_librarys", "plus_one", "twice"]


def test_a_kernel_of_another_compiler_may_be_noted(found):
    case = found("others")["noted"]
    assert (threads_of(case), case["launched"]) == ({"hf_paged-compile"}, ["another_librarys"])


def test_what_is_compiled_ahead_is_launched_by_nobody_and_waited_for_by_nobody(found):
    case = found("ahead")["missing"]
    assert (case["at once"], case["error"], case["launched"]) == (False, None, [])
    assert case["shared"], "who asks again waits for the same compiler"
    assert sorted(name for name, *_ in case["compiled"]) == ["plus_one", "twice"]
    assert threads_of(case) == {"hf_paged-compile"}
    assert found("ahead")["then"]["compiled"] == [] and found("ahead")["then"]["calls"] == 1


def test_what_is_there_or_on_the_disk_is_not_compiled_ahead_in_a_thread(found):
    case = found("ahead")
    assert (case["known"]["at once"], case["known"]["compiled"]) == (True, [])
    on_disk = case["on the disk"]
    assert (on_disk["at once"], on_disk["launched"]) == (True, [])
    assert on_disk["compiled"] == [["twice", "MainThread", True], ["plus_one", "MainThread", True]]
    assert (case["behind it"]["compiled"], case["behind it"]["launched"]) == ([], ["twice", "plus_one"])
    missed = case["one is missing"]
    assert not missed["at once"] and [name for name, *_ in missed["compiled"]] == ["another_librarys"]


def test_an_error_of_a_compiler_that_runs_ahead_is_the_futures(found):
    assert found("ahead")["broken"]["error"] == "CompilationError" and not found("ahead")["dry afterwards"]


CPU_CALL = """
import gc, json
import hf_paged
from support import batch, tiny_model
from hf_paged.kernels.build.compiling import Kernel, prepare_triton

model = hf_paged.enable(tiny_model(), strict=True)
model.generate(**batch([5, 9]), max_new_tokens=3, do_sample=True, top_k=5)
gc.unfreeze()
kernels = [one for one in gc.get_objects() if isinstance(one, Kernel)]
print(json.dumps([len(kernels), sum("params" in vars(one) for one in kernels), prepare_triton.cache_info().currsize]))
"""


@pytest.mark.slow
def test_on_a_cpu_no_kernel_is_read_and_triton_is_not_prepared(tmp_path):
    own = environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CPU_CALL], env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    known, read, prepared = json.loads(done.stdout.splitlines()[-1])
    assert (known > 20, read, prepared) == (True, 0, 0)


def test_no_kernel_escapes():
    """Whatever is launched is made by `jit`, or `noted`."""
    num_kernels = 0
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        launched = {node.func.value.id for node in nodes if isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.name in launched and node.decorator_list:
                made_by = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
                assert made_by & {"jit", "noted"}, (path, node.name, made_by)
                num_kernels += 1
    assert num_kernels > 30


def test_the_log_counts_what_is_compiled_what_is_loaded_and_the_wait(found):
    case = found("log")
    assert (case["compiled"], case["loaded"], case["known"]) == ([2, 0], [0, 2], [0, 0])
    (compiling_took, longest, num_delayed), (loading_took, *_) = case["compiled: waited"], case["loaded: waited"]
    assert compiling_took > loading_took > 0.0 and longest == compiling_took and num_delayed == 1
    assert case["known: waited"] == [0.0, 0.0, 0]


def test_a_kernel_that_requests_of_a_ready_engine_wait_for_is_warned_of_once(found):
    case = found("after_ready")
    names = {name: sorted(text.split("(")[0].split()[-1] for text in one["texts"]) for name, one in case.items()}
    assert names == {"before": [], "after": ["plus_one"], "at its launch": ["twice"], "again": ["twice"], "ignored": [],
                     "refused": [], "for later": ["plus_one"]}
    text, = case["after"]["texts"]
    assert "plus_one(x=*fp32, out=*fp32, TILE=32)" in text and "warm_up(requests)" in text
    # Its launch would find the kernel on the disk, and say nothing.
    assert (case["refused"]["error"], case["refused"]["launched"], case["refused"]["compiled"]) == (
        "LateKernelError", [], 1)


def test_a_policy_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("HF_PAGED_AFTER_READY", "eror")
    with pytest.raises(ValueError, match="HF_PAGED_AFTER_READY='eror': expected one of warn, error, ignore"):
        kernel_log.StepDelays()


def test_records_of_variants_are_those_of_other_processes(found):
    """Of two variants that differ in the alignment of a pointer; records that are none are left out."""
    case = found("records")
    assert case["noted"] == ["hf_paged.kernels.weights_checksum:_checksum_kernel"] * 2
    assert case["known"] == {"missing": 0, "launched": [], "loaded": [], "after launches": 0}
    assert case["on the disk"] == {"missing": 0, "launched": [], "loaded": [True, True], "after launches": 2}
    assert (case["missing"], case["then"]) == (2, [])
