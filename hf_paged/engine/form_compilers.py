"""Forms of outputs compiled in processes of their own, which can be ended: by a limit of time, or since their callers
do not wait any more."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hf_paged.device.cuda import num_cores
from hf_paged.engine.form_compiler import STACK_BYTES
from hf_paged.options.structured import Structured
from hf_paged.process_lock import ProcessLock
from hf_paged.python_process import module_process

logger = logging.getLogger(__name__)

# Of one compilation; more threads take longer to start than they save.
THREADS = max(1, min(8, num_cores() // 4))
PLACES = max(2, min(8, num_cores() // THREADS))  # compilations at the same time

# What happened to a form, and more about it, as `FormServer` answers, or one of: "lost" (the process ended), "none"
# (the process ended before it could compile anything), "failed" (through no fault of the form; why).
OnAnswer = Callable[[str, Any], None]


class FormCompilers:
    """The process that compiles (`FormServer`), started when a form is first asked for, and again if it ends.

    Any thread may use it. Answers come in a thread of their own.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._numbers = itertools.count()
        self._helper: _Helper | None = None
        atexit.register(self.stop)

    def start(self) -> None:
        """Have the process come up, which takes a while, if it is not there.

        Raises:
            OSError: no process can be started here.
            RuntimeError: no thread can be started now.
        """
        with self._lock.rlock:
            if self._helper is None:
                self._helper = _Helper(self._ended)

    def compile(self, vocabulary: Vocabulary, structured: Structured, seconds: float, on_answer: OnAnswer) -> int:
        """Begin; returns the number by which it can be cancelled.

        Raises:
            OSError: no process can be started here.
            RuntimeError: no thread can be started now.
        """
        with self._lock.rlock:
            self.start()
            helper, number = self._helper, next(self._numbers)
            assert helper is not None
            helper.waiting[number] = on_answer
            if vocabulary.number not in helper.sent:
                helper.ask("vocabulary", vocabulary.number, vocabulary.serialized())
                helper.sent.add(vocabulary.number)
            helper.ask("compile", number, vocabulary.number, tuple(structured), seconds)
            return number

    def cancel(self, number: int) -> None:
        """Drop a compilation whose answer nothing waits for any more; the answer does not come."""
        helper = self._helper
        if helper is not None and helper.waiting.pop(number, None) is not None:
            helper.ask("cancel", number)

    def forget(self, vocabulary: int) -> None:
        """Drop a vocabulary that no form is compiled for any more. Takes no lock: garbage is collected at any time."""
        if (helper := self._helper) is not None:
            helper.ask("forget", vocabulary)

    def in_thread(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function in a thread whose stack has room for a form that the process was able to compile.

        Raises:
            RuntimeError: no thread can be started now.
        """
        with self._lock.rlock:
            before = threading.stack_size(2 * STACK_BYTES)
            try:
                threading.Thread(target=function, args=given, daemon=True, name="hf_paged form").start()
            finally:
                threading.stack_size(before)

    def stop(self) -> None:
        """End the process; forms that it has not compiled have failed."""
        with self._lock.rlock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def leave_to_parent(self) -> None:
        """In the child of a fork: forget the process, which is the parent's, and close this end of its pipes."""
        if self._helper is not None:  # else the process would not notice that the parent has ended
            self._helper.commands.close()
            self._helper.answers.close()
        self._helper = None

    def _ended(self, helper: _Helper) -> None:
        """In the thread that reads: tell all that waits for a process which has ended."""
        with self._lock.rlock:
            was_stopped = self._helper is not helper
            if not was_stopped:
                self._helper = None
        what = "failed" if was_stopped else "lost" if helper.is_up else "none"
        more = "the process that compiles was stopped" if was_stopped else helper.process.returncode
        if helper.waiting and not was_stopped:
            logger.warning("hf_paged: the process that compiles grammars ended (%s); %s", more,
                           "another one compiles in its place" if helper.is_up else
                           "this one compiles in its place, without limits of time and memory")
        for number in list(helper.waiting):  # without the lock, which their callers take behind their own
            helper.answer(number, what, more)


class _Helper:
    """One run of the process, and what is asked of it.

    What asks holds locks. So a thread writes what is asked, lest one waits behind a lock for a pipe that is full until
    answers are read; another thread reads these.

    Args:
        on_end: called by the thread that reads, when the process has ended.

    Attributes:
        waiting: what is to be called with the answer to a form, by its number.
        sent: the numbers of vocabularies that the process has.
        is_up: it has said that it can compile.
    """

    def __init__(self, on_end: Callable[[_Helper], None]) -> None:
        if not hasattr(os, "fork"):
            raise OSError("os.fork: expected a system that has it")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
        arguments = module_process("hf_paged.engine.form_process", environment)
        arguments["args"] += [str(PLACES), str(THREADS)]
        self.process = subprocess.Popen(**arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        # Connections close what they are given: files of `process` must not close it again.
        self.commands = Connection(os.dup(self.process.stdin.fileno()), readable=False)
        self.answers = Connection(os.dup(self.process.stdout.fileno()), writable=False)
        self.process.stdin.close()
        self.process.stdout.close()
        self.waiting: dict[int, OnAnswer] = {}
        self.sent: set[int] = set()
        self.is_up = False
        self._asked: SimpleQueue[tuple | None] = SimpleQueue()
        try:
            threading.Thread(target=self._write, daemon=True, name="hf_paged forms asked").start()
            threading.Thread(target=self._read, args=(on_end,), daemon=True, name="hf_paged forms").start()
        except BaseException:
            self.end()
            raise

    def ask(self, *command: Any) -> None:
        """Have a command written, soon."""
        self._asked.put(command)

    def answer(self, number: int, what: str, more: Any) -> None:
        """Hand out an answer, if anything waits for it."""
        on_answer = self.waiting.pop(number, None)
        if on_answer is None:
            return
        try:
            on_answer(what, more)
        except Exception as error:  # no thread can be started: other answers are still to come
            on_answer("failed", str(error))

    def end(self) -> None:
        """Kill the process and its children, which are a process group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # none is left; PermissionError: so says macOS
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._asked.put(None)

    def _write(self) -> None:
        try:
            while (command := self._asked.get()) is not None:
                self.commands.send(command)
        except OSError:  # the process has ended, which the other thread notices
            pass
        finally:
            self.commands.close()

    def _read(self, on_end: Callable[[_Helper], None]) -> None:
        try:
            while True:
                number, what, more = self.answers.recv()
                self.is_up = True
                self.answer(number, what, more)
        except (EOFError, OSError):
            pass
        finally:
            self.answers.close()
            self.end()
            on_end(self)


COMPILERS = FormCompilers()


class Vocabulary:
    """A vocabulary that forms are compiled for.

    Attributes:
        number: of its own.
        info: xgrammar's `TokenizerInfo`.
        compiler: xgrammar's `GrammarCompiler`, for forms that are known to compile fast.
    """

    _numbers = itertools.count()

    def __init__(self, xgrammar: Any, info: Any) -> None:
        self.number = next(self._numbers)
        self.info = info
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        weakref.finalize(self, COMPILERS.forget, self.number)

    def serialized(self) -> str:
        """What another process makes `info` of."""
        return str(self.info.serialize_json())
