"""Forms compiled by processes: limits of time, memory and recursion, sharing, cancelling, and ends of the process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import byte_tokenizer, in_child, random_prompts, tiny_model

from hf_paged import PagedGenerator
from hf_paged.config import PagedConfig
from hf_paged.engine.structured import form_process
from hf_paged.engine.structured import grammars as grammars_module
from hf_paged.engine.structured.form_compilers import COMPILERS
from hf_paged.engine.structured.form_process import FormServer, _Process
from hf_paged.engine.structured.form_queue import Job
from hf_paged.engine.structured.grammars import Grammars
from hf_paged.options.structured import FormError, Structured, read_structured

pytest.importorskip("xgrammar", reason="of the extra `structured`")
TOKENIZER = byte_tokenizer()
QUICK = Structured("regex", "[0-9]{3}")


def deep(depth, name="a"):
    schema = {"type": "string"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"{name}{level}": schema}, "required": [f"{name}{level}"],
                  "additionalProperties": False}
    return read_structured({"json_schema": schema})


SLOW = deep(320)


def made(**limits):
    grammars = Grammars(256, PagedConfig(**limits))
    grammars.compile(QUICK, TOKENIZER)  # the process is there, and knows the vocabulary
    return grammars


def children():
    """Compilations that run."""
    pid = COMPILERS._helper.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def runs(pid):
    """A process that has ended may be there until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def script(text, *arguments):
    """A Python that runs `text` with what is defined here."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", f"from test_form_compilers import *\n{text}",
                             *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def settles(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_limits_of_time_and_size():
    grammars = made(structured_max_seconds=0.3, structured_max_bytes=50_000)
    began = time.monotonic()
    with pytest.raises(FormError, match=r"took more than structured_max_seconds=0\.3 \(PagedConfig\)"):
        grammars.compile(SLOW, TOKENIZER)
    with pytest.raises(FormError, match=r"it has 50,001 bytes; expected at most structured_max_bytes=50,000"):
        grammars.compile(Structured("regex", "a" * 50_001), TOKENIZER)
    assert time.monotonic() - began < 5 and settles(lambda: not children())
    began = time.monotonic()
    with pytest.raises(FormError, match="structured_max_seconds"):  # it is remembered for a while
        grammars.compile(SLOW, TOKENIZER)
    assert time.monotonic() - began < 0.2


def test_slow_forms_hold_up_no_other():
    grammars = made(structured_max_seconds=1.0)
    slow = [grammars.begin(deep(320, name), TOKENIZER) for name in "abcdefghij"]
    time.sleep(0.3)
    for number in range(3):
        assert grammars.begin(QUICK, TOKENIZER).done()  # it is known
        grammars.compile(Structured("regex", f"[a-z]{{{number + 1}}}"), TOKENIZER)
    assert sum(one.done() for one in slow) < 5
    for one in slow:
        one.cancel()
    assert settles(lambda: not children())


def test_equal_forms_are_compiled_once_however_many_ask(monkeypatch):
    grammars, asked, own = made(), [], COMPILERS.compile
    monkeypatch.setattr(COMPILERS, "compile", lambda *given: asked.append(given[1]) or own(*given))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: grammars.compile(deep(60), TOKENIZER), range(8)))
    assert len({*map(id, found)}) == 1 and asked == [deep(60)]


def test_a_form_that_no_caller_waits_for_is_not_compiled_to_its_end():
    grammars = made()
    waiters = [grammars.begin(SLOW, TOKENIZER) for _ in range(3)]
    assert settles(lambda: len(children()) == 1)
    for waiter in waiters[:2]:
        waiter.cancel()
    time.sleep(0.1)
    assert len(children()) == 1 and not waiters[2].done()
    waiters[2].cancel()
    assert settles(lambda: not children())
    assert not grammars._open and grammars.begin(QUICK, TOKENIZER).done()


@pytest.mark.parametrize(("breaks", "how"), [
    (lambda job: os.kill(os.getpid(), signal.SIGSEGV), "xgrammar ended its process (Segmentation fault)"),
    (lambda job: bytearray(3 << 30), "it needs more than 2 GiB of memory"),
    (lambda job: os._exit(3), "xgrammar ended its process (without an answer)"),
])
def test_a_form_that_breaks_its_process_is_its_own(breaks, how):
    process = _Process(breaks, Job(0, 0, QUICK, 10.0))
    assert process.answer() == ("broke", how)
    process.kill()


def test_a_form_that_breaks_its_process_is_refused(monkeypatch):
    grammars, own = made(), COMPILERS.compile

    def breaks(*given):
        return own(*given[:3], lambda what, more: given[3]("broke", "xgrammar ended its process"))

    monkeypatch.setattr(COMPILERS, "compile", breaks)
    with pytest.raises(FormError, match="compiling it failed: xgrammar ended its process; expected a smaller form"):
        grammars.compile(Structured("regex", "[0-9]{6}"), TOKENIZER)


def test_a_process_that_ends_is_replaced():
    grammars = made()
    waiter = grammars.begin(deep(60, "lost"), TOKENIZER)
    COMPILERS._helper.process.kill()
    assert waiter.result(timeout=30) is not None  # compiled by another one
    assert grammars.compile(Structured("regex", "[0-9]{7}"), TOKENIZER) is not None
    assert COMPILERS._helper.process.poll() is None


def test_a_process_that_ends_takes_what_compiles_with_it():
    """Of forms that it was compiling, another one begins again, under the same limits; once."""
    grammars = made(structured_max_seconds=2.0)
    waiters = [grammars.begin(deep(320, name), TOKENIZER) for name in "ab"]
    assert settles(lambda: len(children()) == 2)
    ended, helper = children(), COMPILERS._helper
    helper.process.kill()
    assert grammars.begin(Structured("regex", "[a-c]{7}"), TOKENIZER).result(timeout=20) is not None
    assert settles(lambda: not any(map(runs, ended)), 2.0)
    assert "structured_max_seconds=2" in str(waiters[0].exception(timeout=20))
    assert "structured_max_seconds=2" in str(waiters[1].exception(timeout=20))
    waiter = grammars.begin(deep(320, "c"), TOKENIZER)
    for _ in range(2):
        assert settles(lambda last=helper: COMPILERS._helper not in (None, last) and COMPILERS._helper.is_up)
        assert settles(children)
        helper = COMPILERS._helper
        helper.process.kill()
    with pytest.raises(FormError, match=r"the process that compiles grammars ended twice \(-9\)"):
        waiter.result(timeout=20)
    assert deep(320, "c") not in [key.structured for key in grammars._refused]  # another try may go well


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_that_ends_leaves_no_process_behind():
    """Nor one that keeps its standard output open, whose reader would wait for ever."""
    text = """if True:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore it
        waiter = made(structured_max_seconds=60).begin(SLOW, TOKENIZER)
        assert settles(children)
        print("pids:", COMPILERS._helper.process.pid, *children(), flush=True)
        os.kill(os.getpid(), int(sys.argv[1]))
    """
    programs = {number: script(text, str(int(number))) for number in (0, signal.SIGINT, signal.SIGKILL)}
    for number, program in programs.items():
        found = []
        reader = threading.Thread(target=lambda found=found, one=program: found.append(one.communicate()[0]))
        reader.daemon = True
        reader.start()
        reader.join(60)
        assert found, f"its output stays open: signal {number}"
        pids = re.search("pids: ([0-9 ]+)", found[0])[1].split()
        assert len(pids) == 2 and settles(lambda pids=pids: not any(map(runs, pids)), 3.0)
        assert ("KeyboardInterrupt" in found[0]) == (number == signal.SIGINT)


def test_small_stacks_of_threads_have_no_part_in_forms():
    """What compiles in a process of its own is compiled once more by a thread, which a stack too small would break."""
    program = script("""if True:
        threading.stack_size(256 << 10)
        form = Structured("regex", "(" * 1000 + "a" + ")" * 1000)
        assert made(structured_max_seconds=60).compile(form, TOKENIZER) is not None
        # The thread that began the other one takes its own size back, perhaps a moment after the answer.
        time.sleep(0.5)
        assert threading.stack_size() == 256 << 10  # a second look would find 0, which looking sets
        print("compiled")
    """)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 0 and "compiled" in output, output


def test_asking_waits_for_no_pipe():
    """A thread that did so, behind locks that answers need, would wait for a process that waits for it."""
    grammars, asked = made(), []
    pid = COMPILERS._helper.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(daemon=True, target=lambda: asked.append(
            grammars.begin(Structured("regex", "a" * 200_000), TOKENIZER)))
        thread.start()
        assert settles(lambda: asked, 5.0)
        assert grammars.begin(QUICK, TOKENIZER).done()  # nor does one behind it
    finally:
        os.kill(pid, signal.SIGCONT)
    asked[0].cancel()
    assert grammars.compile(Structured("regex", "[0-9]{11}"), TOKENIZER) is not None


@pytest.mark.parametrize("name", ["hf_paged form", "hf_paged forms", "hf_paged forms asked"])
def test_a_thread_that_cannot_be_started_fails_one_call(monkeypatch, name):
    grammars, own, failed = made(), threading.Thread.start, []

    def start(thread):
        if thread.name == name and not failed:
            failed.append(name)
            raise RuntimeError("can't start new thread")
        own(thread)

    if name != "hf_paged form":
        COMPILERS.stop()
    monkeypatch.setattr(threading.Thread, "start", start)
    form = Structured("regex", f"[a-c]{{{len(name)}}}")
    with pytest.raises((RuntimeError, FormError), match="can't start new thread"):
        grammars.begin(form, TOKENIZER).result(timeout=20)
    assert failed and grammars.begin(form, TOKENIZER).result(timeout=20) is not None


@pytest.fixture
def no_children_to_wait_for():
    """As in a program that ignores the ends of its children."""
    COMPILERS.stop()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)
    COMPILERS.stop()


@pytest.mark.usefixtures("no_children_to_wait_for")
def test_limits_hold_where_the_program_ignores_ends_of_children():
    grammars = made(structured_max_seconds=0.5)
    helper = COMPILERS._helper
    with pytest.raises(FormError, match="structured_max_seconds"):
        grammars.begin(SLOW, TOKENIZER).result(timeout=5)
    assert COMPILERS._helper is helper
    process = _Process(lambda job: time.sleep(60), Job(0, 0, QUICK, 10.0))
    process.kill()


@contextmanager
def serving(monkeypatch, compile):
    """A `FormServer` in a thread, for which `compile(structured)` compiles; what sends it a form and what answers."""
    monkeypatch.setattr(form_process, "load_xgrammar", lambda: SimpleNamespace(
        TokenizerInfo=SimpleNamespace(deserialize_json=str), GrammarCompiler=lambda *given, **options: None))
    monkeypatch.setattr(form_process, "compile_form", lambda xgrammar, compiler, structured: compile(structured))
    (commands, ask), (answers, answer) = Pipe(duplex=False), Pipe(duplex=False)
    server = FormServer(commands, answer, 2, 1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ask.send(("vocabulary", 7, "of it"))
    assert answers.poll(10) and answers.recv() == (-1, "up", None)
    try:
        yield lambda number: ask.send(("compile", number, 7, tuple(QUICK), 5.0)), answers
    finally:
        ask.close()
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a fork may catch a lock of execnet's threads")
def test_a_form_that_breaks_its_process_leaves_the_others(monkeypatch):
    def breaks(structured):
        os.kill(os.getpid(), signal.SIGSEGV)

    with serving(monkeypatch, breaks) as (send, answers):
        for number in range(3):
            send(number)
            assert answers.poll(10)
            assert answers.recv() == (number, "broke", "xgrammar ended its process (Segmentation fault)")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a fork may catch a lock of execnet's threads")
def test_a_process_that_cannot_be_started_for_a_form_leaves_the_others(monkeypatch):
    own, failed = os.fork, []

    def fork():
        if not failed:
            failed.append(True)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return own()

    with serving(monkeypatch, lambda structured: None) as (send, answers):
        monkeypatch.setattr(os, "fork", fork)
        for number in range(2):
            send(number)
        assert answers.poll(10)
        found = sorted([answers.recv(), answers.recv()])
    assert [what for _, what, _ in found] == ["failed", "quick"]
    assert "Resource temporarily unavailable" in found[0][2]


def test_an_answer_that_breaks_off_is_its_own():
    process = _Process(lambda job: os.kill(os.getpid(), signal.SIGKILL), Job(0, 0, QUICK, 10.0))
    reads, writes = os.pipe()
    os.write(writes, b"\0\0\1\0half of it")
    os.close(writes)
    os.dup2(reads, process.pipe.fileno())
    os.close(reads)
    assert process.answer() == ("broke", "xgrammar ended its process (Killed)")
    process.kill()


def test_a_child_has_no_pipes_but_its_own():
    others = os.pipe()
    process = _Process(lambda job: sorted(map(int, os.listdir("/dev/fd"))), Job(0, 0, QUICK, 10.0))
    files = process.answer()
    process.kill()
    assert len(files) == 5 and not {*others} & {*files}  # standard ones, its pipe, and the folder that it lists
    for file in others:
        os.close(file)


def test_without_a_process_forms_are_compiled_here(monkeypatch):
    def refuse():
        raise OSError("none here")

    monkeypatch.setattr(COMPILERS, "start", refuse)
    assert Grammars(256, PagedConfig()).compile(QUICK, TOKENIZER) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_a_process_of_its_own():
    grammars = made()
    mine = COMPILERS._helper.process.pid

    def compile_again():
        grammars.compile(Structured("regex", "[0-9]{8}"), TOKENIZER)
        assert COMPILERS._helper.process.pid != mine
        COMPILERS.stop()

    assert in_child(compile_again) == 0
    assert COMPILERS._helper.process.pid == mine
    assert grammars.compile(Structured("regex", "[0-9]{9}"), TOKENIZER) is not None


def test_slow_forms_of_awaited_calls_hold_up_no_other(monkeypatch):
    """More of them than the event loop has threads."""
    prompt = random_prompts([8])

    async def main(generator):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        options = {"max_new_tokens": 4}
        await generator.agenerate(prompt, structured={"regex": "[0-9]{3}"}, **options)
        slow = [asyncio.ensure_future(generator.agenerate(
            prompt, structured=[{"json_schema": deep(320, name).text}], **options)) for name in "abcd"]
        await asyncio.sleep(0.2)
        await generator.agenerate(prompt, structured={"regex": "[0-9]{3}"}, **options)
        await generator.agenerate(prompt, structured={"regex": "[a-z]{3}"}, **options)
        pending = sum(not one.done() for one in slow)
        found = await asyncio.gather(*slow, return_exceptions=True)
        return pending, found

    with PagedGenerator(tiny_model(), TOKENIZER, structured_max_seconds=1.0) as generator:
        pending, found = asyncio.run(main(generator))
    assert pending >= 3 and all("structured_max_seconds" in str(error) for error in found)


def test_an_awaited_call_that_is_cancelled_while_its_forms_begin_leaves_none(monkeypatch):
    entered, goes_on, begun, own = threading.Event(), threading.Event(), [], Grammars.begin

    def begin(self, *given):
        entered.set()
        assert goes_on.wait(10)
        begun.append(own(self, *given))
        return begun[-1]

    async def main(generator):
        await generator.agenerate(random_prompts([8]), max_new_tokens=1)
        monkeypatch.setattr(Grammars, "begin", begin)
        call = asyncio.ensure_future(generator.agenerate(
            random_prompts([8]), structured=[{"json_schema": SLOW.text}], max_new_tokens=1))
        await asyncio.to_thread(entered.wait, 10)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        goes_on.set()

    with PagedGenerator(tiny_model(), TOKENIZER) as generator:
        asyncio.run(main(generator))
    assert settles(lambda: begun and begun[0].cancelled(), 5.0)
    assert settles(lambda: not children(), 5.0)


def test_forms_of_a_call_are_compiled_side_by_side(monkeypatch):
    """And those that are refused are their prompts' own."""
    forms = [read_structured({"regex": f"[0-9]{{{number + 10}}}"}) for number in range(6)]
    begun, own = [], Grammars.begin
    monkeypatch.setattr(Grammars, "begin", lambda self, *given: begun.append(given[0]) or own(self, *given))
    monkeypatch.setattr(Grammars, "compile", lambda self, *given: wait([own(self, *given)]).done.pop().result())
    with PagedGenerator(tiny_model(), TOKENIZER, structured_max_bytes=20) as generator:
        made = generator.generate(random_prompts([8] * 7), structured=[*forms, {"regex": "a" * 30}], use_tqdm=False,
                                  on_error="complete", max_new_tokens=2)
    assert begun[:7] == [*forms, Structured("regex", "a" * 30)]
    assert [one.finish_reason for one in made] == ["length"] * 6 + ["error"]
    assert "structured_max_bytes=20" in made[-1].error


def test_compiled_forms_are_kept_as_long_as_there_is_room(monkeypatch):
    forms = [Structured("regex", f"[a-z]{{1,{most}}}") for most in (30, 31, 32)]
    sizes = [made().compile(form, TOKENIZER).nbytes for form in forms]
    monkeypatch.setattr(grammars_module, "_CACHED_BYTES", sum(sizes) - 1)
    grammars = made()
    for form in (forms[0], forms[1], forms[0], forms[2]):  # the second was used least recently of the three
        grammars.compile(form, TOKENIZER)
    assert [key.structured for key in grammars._known] == [forms[0], forms[2]]
