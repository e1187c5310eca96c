"""How a server process ends by Ctrl-C: answers under way end with a reason, and no traceback is printed."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_process import ServerProcess, openai

from hf_paged.server import ending
from hf_paged.server.ending import REASON, OpenAnswers, ending_server

pytest.importorskip("fastapi")
MESSAGES = [{"role": "user", "content": "count from 3 to 7"}]


@pytest.mark.parametrize("batching", ["--continuous-batching",
                                      pytest.param("--no-continuous-batching", marks=pytest.mark.slow)])
def test_open_answers_end_with_a_reason_and_the_process_with_0(trained_path, tmp_path, batching):
    server = ServerProcess(trained_path, batching, log=tmp_path / "log")
    try:
        begun = threading.Semaphore(0)
        body = {"ignore_eos": True, "structured_outputs": {"regex": "[0-9]*"}}

        def ask(stream):
            answer = server.client.chat.completions.create(model=server.path, messages=MESSAGES, stream=stream,
                                                           max_tokens=900, extra_body=body)
            if stream:
                for number, _ in enumerate(answer):
                    if number == 2:
                        begun.release()
            return "done"

        def reason(stream):
            with pytest.raises(openai.APIError) as caught:
                ask(stream)
            return str(caught.value), time.monotonic()

        count = 3 if batching == "--continuous-batching" else 1
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(reason, True) for _ in range(count)]
            for _ in streams:
                assert begun.acquire(timeout=60)
            whole = pool.submit(reason, False)
            time.sleep(0.3)
            server.interrupt()
            began = time.monotonic()
            assert server.process.wait(timeout=5) == 0, server.said()
            for future in (*streams, whole):
                said, ended = future.result()
                assert REASON in said and ended - began < 5
        assert "Traceback" not in server.said() and "Error" not in server.said()
    finally:
        server.close()


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    class Stock:
        should_exit = False

        def run(self):
            ran.append("server")

    left, timers, ran = [], [], []
    monkeypatch.setattr(ending.atexit, "_run_exitfuncs", lambda: ran.append("exit functions"))
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(ending.threading, "Timer", lambda *arguments: timers.append(arguments) or threading.Thread())
    server = ending_server(Stock, OpenAnswers())()
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and left == []
    server.run()
    assert left == [0] and ran == ["server", "exit functions"]
    left.clear()
    [(seconds, leave, (code,))] = timers
    assert seconds < 5
    leave(code)
    assert left == [0]
    server.handle_exit(signal.SIGINT, None)
    assert left == [0, 130]
