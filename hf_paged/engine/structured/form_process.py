"""A process that compiles forms of outputs, each in a child of its own that can be killed at any time.

The C++ code of xgrammar cannot be interrupted, may need any amount of memory, and crashes if a form makes it recurse
too deeply. `FormCompilers` runs the process, which ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import signal
import sys
import time
import types
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from hf_paged.engine.structured.form_compiler import STACK_BYTES, compile_form, said
from hf_paged.engine.structured.form_queue import FormQueue, Job
from hf_paged.options.structured import Structured

# A form that compiles faster is compiled again in the process that needs it, which is faster than sending the result.
QUICK_S = 0.5
MEMORY_BYTES = 2 << 30  # limit of one compilation
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_MOST_FILES = 1024  # all descriptors of `FormServer` are below: it starts with three, and opens a few pipes


def load_xgrammar() -> Any:
    """Return the part of xgrammar that compiles, without torch and transformers, which take seconds to import."""
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    stand_in: Any = types.ModuleType("transformers")  # the package imports two of its classes to read tokenizers
    stand_in.PreTrainedTokenizerBase = stand_in.PreTrainedTokenizerFast = type("Tokenizer", (), {})
    sys.modules.update({"torch": None, "transformers": stand_in, "xgrammar": package})  # type: ignore[dict-item]
    try:
        importlib.import_module("xgrammar.load_binding")
        for name in ("grammar", "tokenizer_info", "compiler"):
            vars(package).update(vars(importlib.import_module(f"xgrammar.{name}")))
    except Exception:  # another version of xgrammar needs more modules: import the whole package
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers", "xgrammar")]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")
    return package


class FormServer:
    """A server that reads commands and writes answers (number of the job, what happened, details).

    The first answer has the number -1, which no job has, and means that the server can compile.

    Commands are ``("vocabulary", number, serialized TokenizerInfo)``, ``("forget", number)`` for a vocabulary that no
    job needs any more, ``("compile", number, vocabulary, form, seconds)`` and ``("cancel", number)``. What happened is
    one of "quick" (the form compiles within `QUICK_S`), "compiled" (with the serialized grammar), "refused" (why),
    "late", "broke" (how) and "failed" (a cause outside of the form, and which).

    Args:
        places: number of compilations at the same time.
        threads: threads of each compilation.
    """

    def __init__(self, commands: Connection, answers: Connection, places: int, threads: int) -> None:
        self._commands, self._answers, self._threads = commands, answers, threads
        self._xgrammar = load_xgrammar()
        self._queue = FormQueue(places)
        self._jobs: dict[int, Job] = {}
        self._vocabularies: dict[int, Any] = {}

    def run(self) -> None:
        """Serve until the pipe of commands is closed."""
        try:
            self._answers.send((-1, "up", None))
            while True:
                pipes = {job.process.pipe: job for job in self._queue.running}
                for pipe in wait([self._commands, *pipes], self._queue.wait(time.monotonic())):
                    if pipe is self._commands:
                        self._obey(self._commands.recv())
                    elif (job := pipes[pipe]).number in self._jobs:  # else a command just before has cancelled it
                        self._end(job, *job.process.answer())
                changes = self._queue.change(time.monotonic())
                for job in changes.late:
                    self._end(job, "late", None)
                for job in changes.stopped:
                    _kill(job)
                for job in changes.begun:
                    self._begin(job)
        except (EOFError, OSError):  # the parent has ended, perhaps in the middle of a command or an answer
            pass
        finally:
            for job in self._queue.running:
                _kill(job)

    def _obey(self, command: tuple) -> None:
        kind, number, *given = command
        if kind == "vocabulary":
            self._vocabularies[number] = self._xgrammar.TokenizerInfo.deserialize_json(*given)
        elif kind == "forget":
            self._vocabularies.pop(number, None)
        elif kind == "compile":
            vocabulary, form, seconds = given
            self._jobs[number] = job = Job(number, vocabulary, Structured(*form), seconds)
            self._queue.add(job)
        elif (cancelled := self._jobs.pop(number, None)) is not None:
            self._queue.remove(cancelled)
            _kill(cancelled)

    def _begin(self, job: Job) -> None:
        try:
            job.process = _Process(self._compile, job)
        except OSError as error:  # of this job alone: it must not end the server, which other jobs need
            job.process = None
            self._end(job, "failed", f"no process can be started for it ({error})")

    def _end(self, job: Job, what: str, more: Any) -> None:
        _kill(job)
        self._queue.remove(job)
        del self._jobs[job.number]
        self._answers.send((job.number, what, more))

    def _compile(self, job: Job) -> tuple[str, Any]:
        info = self._vocabularies[job.vocabulary]
        compiler = self._xgrammar.GrammarCompiler(info, max_threads=self._threads, cache_enabled=False)
        started = time.monotonic()
        try:
            compiled = compile_form(self._xgrammar, compiler, job.structured)
        except MemoryError:
            raise
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            return "refused", said(error)
        is_quick = time.monotonic() - started < QUICK_S
        return ("quick", None) if is_quick else ("compiled", compiled.serialize_json())


class _Process:
    """A child that compiles one form and writes its answer to ``pipe``."""

    def __init__(self, compile: Any, job: Job) -> None:
        self.pipe, theirs = Pipe(duplex=False)
        parent = os.getpid()
        try:
            self._pid: int | None = os.fork()
        except OSError:
            self.pipe.close()
            theirs.close()
            raise
        if self._pid == 0:
            try:
                _keep_only(theirs.fileno())
                _end_with(parent)
                _limit(job.seconds)
                theirs.send(compile(job))
            except MemoryError:
                theirs.send(("broke", f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"))
            finally:
                os._exit(0)
        theirs.close()

    def answer(self) -> tuple[str, Any]:
        """Return the child's answer; or how the child ended, if it sent none or only a part."""
        try:
            found: tuple[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return "broke", f"xgrammar ended its process ({self._reap()})"
        return found

    def kill(self) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reap()
        self.pipe.close()

    def _reap(self) -> str:
        assert self._pid is not None
        try:
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:
            return "without an answer"
        finally:
            self._pid = None
        return signal.strsignal(os.WTERMSIG(status)) or "" if os.WIFSIGNALED(status) else "without an answer"


def _kill(job: Job) -> None:
    if job.process is not None:
        job.process.kill()


def _keep_only(file: int) -> None:
    """Close all descriptors of a child but one.

    A child would otherwise keep pipes and the terminal open after the server or the program has ended: a reader of one
    of the pipes would wait for its end for ever.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, file)
    os.closerange(file + 1, _MOST_FILES)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, which cannot kill it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above, so that no signal comes
        os._exit(0)


def _limit(seconds: float) -> None:
    """Limit the resources of this process. The limit of processor time is for a child whose parent has ended."""
    cpu = int(seconds * (os.cpu_count() or 1)) + 1
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_STACK, STACK_BYTES),
                       (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, cpu)):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Run ``form_process PLACES THREADS``: read commands from standard input, write answers to standard output."""
    os.nice(5)  # so that compilations do not slow generation down
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignores it, waitpid would fail for children
    answers = os.dup(1)
    os.dup2(2, 1)  # prints of a library go to standard error, and do not corrupt answers
    FormServer(Connection(0, writable=False), Connection(answers, readable=False), *map(int, sys.argv[1:3])).run()


if __name__ == "__main__":
    main()
