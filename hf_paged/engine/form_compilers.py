"""Forms of outputs compiled in processes of their own, which can be ended: by a limit of time, or since their callers
do not wait any more."""

from __future__ import annotations

import atexit
import itertools
import os
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from hf_paged import at_fork
from hf_paged.kernels._device import num_cores
from hf_paged.options.structured import Structured
from hf_paged.python_process import module_process

# Of one compilation; more threads take longer to start than they save.
THREADS = max(1, min(8, num_cores() // 4))
PLACES = max(2, min(8, num_cores() // THREADS))  # compilations at the same time

# What happened to a form, and more about it, as `FormServer` answers. "lost": the process is gone.
OnAnswer = Callable[[str, Any], None]


class FormCompilers:
    """The process that compiles (`FormServer`), started when a form is first asked for, and again if it ends.

    Any thread may use it. Answers come in a thread of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._commands: Connection | None = None
        self._process: subprocess.Popen | None = None
        self._waiting: dict[int, OnAnswer] = {}
        self._sent: set[int] = set()  # numbers of vocabularies
        self._gone: deque[int] = deque()  # of those that no form is compiled for any more
        at_fork.register(self)
        atexit.register(self.stop)

    def start(self) -> None:
        """Have the process come up, which takes a while, if it is not there.

        Raises:
            OSError: no process can be started here.
        """
        with self._lock:
            if self._commands is not None:
                return
            if not hasattr(os, "fork"):
                raise OSError("os.fork: expected a system that has it")
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
            arguments = module_process("hf_paged.engine.form_process", environment)
            arguments["args"] += [str(PLACES), str(THREADS)]
            self._process = process = subprocess.Popen(**arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None and process.stdout is not None
            # Connections close what they are given: files of `process` must not close it again.
            self._commands = Connection(os.dup(process.stdin.fileno()), readable=False)
            answers = Connection(os.dup(process.stdout.fileno()), writable=False)
            process.stdin.close()
            process.stdout.close()
            threading.Thread(target=self._read, args=(process, answers), daemon=True,
                             name="hf_paged forms").start()

    def compile(self, vocabulary: Vocabulary, structured: Structured, seconds: float, on_answer: OnAnswer) -> int:
        """Begin; returns the number by which it can be cancelled.

        Raises:
            OSError: no process can be started here.
        """
        with self._lock:
            self.start()
            number = next(self._numbers)
            self._waiting[number] = on_answer
            while self._gone:
                if (gone := self._gone.popleft()) in self._sent:
                    self._sent.discard(gone)
                    self._send("forget", gone)
            if vocabulary.number not in self._sent:
                self._send("vocabulary", vocabulary.number, vocabulary.serialized())
                self._sent.add(vocabulary.number)
            self._send("compile", number, vocabulary.number, tuple(structured), seconds)
            return number

    def cancel(self, number: int) -> None:
        """Nobody waits for this answer any more; it does not come."""
        with self._lock:
            if self._waiting.pop(number, None) is not None:
                self._send("cancel", number)

    def forget(self, vocabulary: int) -> None:
        """No form is compiled for this one any more. It sends nothing: garbage is collected in the middle of that."""
        self._gone.append(vocabulary)

    def stop(self) -> None:
        """End the process; who waits is told that it is lost."""
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._end(process)

    def after_fork_in_child(self) -> None:
        """The process and the thread are the parent's, and so is whoever waits."""
        self._lock = at_fork.renewed(self._lock)
        if self._commands is not None:
            self._commands.close()  # else the process would not notice that the parent has ended
        self._commands = self._process = None
        self._waiting, self._sent = {}, set()

    def _send(self, *command: Any) -> None:
        assert self._commands is not None
        with suppress(OSError):  # it is gone, which the thread is about to notice
            self._commands.send(command)

    def _read(self, process: subprocess.Popen, answers: Connection) -> None:
        """In the thread: hand out answers until the process ends."""
        try:
            while True:
                number, what, more = answers.recv()
                with self._lock:
                    on_answer = self._waiting.pop(number, None)
                if on_answer is not None:
                    on_answer(what, more)
        except (EOFError, OSError):
            pass
        finally:
            answers.close()
            process.wait()
            self._end(process)

    def _end(self, process: subprocess.Popen) -> None:
        """The process has ended, if it is still the one that counts."""
        with self._lock:
            if self._process is not process:
                return
            waiting, self._waiting, self._sent = self._waiting, {}, set()
            if self._commands is not None:
                self._commands.close()
            self._commands = self._process = None
        for on_answer in waiting.values():  # without the lock, which their callers take behind their own
            on_answer("lost", process.returncode)


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
