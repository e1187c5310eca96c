"""Compilation of forms of outputs in processes of their own, which are killed when they are late or not needed."""

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
from hf_paged.engine.structured.form_compiler import STACK_BYTES
from hf_paged.options.structured import Structured
from hf_paged.process_lock import ProcessLock
from hf_paged.python_process import module_process

logger = logging.getLogger(__name__)

# Threads of one compilation; more take longer to start than they save.
THREADS = max(1, min(8, num_cores() // 4))
PLACES = max(2, min(8, num_cores() // THREADS))  # compilations at the same time

# Called with what happened to a form and details, as `FormServer` answers, or with: "lost" (the process ended), "none"
# (the process ended before it could compile anything), "failed" (a cause outside of the form, and which).
OnAnswer = Callable[[str, Any], None]


class FormCompilers:
    """The process that compiles (`FormServer`), started with the first form, and again if it ends.

    Thread-safe. Callbacks with answers run in a thread of their own.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._numbers = itertools.count()
        self._helper: _Helper | None = None
        atexit.register(self.stop)

    def start(self) -> None:
        """Start the process, which takes seconds to come up, if there is none.

        Raises:
            OSError: no process can be started here.
            RuntimeError: no thread can be started now.
        """
        with self._lock.rlock:
            if self._helper is None:
                self._helper = _Helper(self._ended)

    def compile(self, vocabulary: Vocabulary, structured: Structured, seconds: float, on_answer: OnAnswer) -> int:
        """Begin to compile a form, and return the number by which `cancel` knows it.

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
        """Cancel a compilation; its callback is not called."""
        helper = self._helper
        if helper is not None and helper.waiting.pop(number, None) is not None:
            helper.ask("cancel", number)

    def forget(self, vocabulary: int) -> None:
        """Drop a vocabulary that is no longer used. Takes no lock, since a finalizer calls it inside of any code."""
        if (helper := self._helper) is not None:
            helper.ask("forget", vocabulary)

    def in_thread(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function in a thread with enough stack for any form that the process was able to compile.

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
        """End the process; the callbacks of its unfinished forms get "failed"."""
        with self._lock.rlock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def leave_to_parent(self) -> None:
        """Forget the parent's process in the child of a fork, and close this end of its pipes."""
        if self._helper is not None:  # an open pipe would keep the process from noticing the end of the parent
            self._helper.commands.close()
            self._helper.answers.close()
        self._helper = None

    def _ended(self, helper: _Helper) -> None:
        """Answer all forms of a process that has ended; runs in the thread that reads."""
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
        for number in list(helper.waiting):  # without the lock: callers take theirs first, which would deadlock
            helper.answer(number, what, more)


class _Helper:
    """One run of the process, with the threads that write commands to it and read its answers.

    Callers hold locks, and must not wait for a full pipe, which empties only as answers are read: so one thread writes
    queued commands, and another thread reads answers.

    Args:
        on_end: called by the thread that reads, when the process has ended.

    Attributes:
        waiting: callbacks for the answers to forms, by number.
        sent: the numbers of vocabularies that the process has.
        is_up: the process has sent an answer, so that it can compile.
    """

    def __init__(self, on_end: Callable[[_Helper], None]) -> None:
        if not hasattr(os, "fork"):
            raise OSError("os.fork: expected a system that has it")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
        arguments = module_process("hf_paged.engine.structured.form_process", environment)
        arguments["args"] += [str(PLACES), str(THREADS)]
        self.process = subprocess.Popen(**arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        # Duplicates, since a Connection closes its descriptor: `process` would close it, or its successor, again.
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
        """Queue a command, which the thread that writes sends."""
        self._asked.put(command)

    def answer(self, number: int, what: str, more: Any) -> None:
        """Call the callback of a form with its answer, unless the form was cancelled."""
        on_answer = self.waiting.pop(number, None)
        if on_answer is None:
            return
        try:
            on_answer(what, more)
        except Exception as error:  # (no thread can be started) must not end this thread: other answers follow
            on_answer("failed", str(error))

    def end(self) -> None:
        """Kill the process group of the process and its children."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # all have ended; macOS raises PermissionError then
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
        number: unique in this process.
        info: xgrammar's `TokenizerInfo`.
        special: the special tokens of its tokenizer.
        compiler: xgrammar's `GrammarCompiler`, for forms that are known to compile fast.
    """

    _numbers = itertools.count()

    def __init__(self, xgrammar: Any, info: Any, special: frozenset[int]) -> None:
        self.number = next(self._numbers)
        self.info, self.special = info, special
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        weakref.finalize(self, COMPILERS.forget, self.number)

    def serialized(self) -> str:
        return str(self.info.serialize_json())
