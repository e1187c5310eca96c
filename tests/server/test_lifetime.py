"""How a server process ends by Ctrl-C: answers under way end with a reason, and no traceback is printed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_process import ServerProcess, openai
from starlette.responses import JSONResponse

from hf_paged.server import lifetime
from hf_paged.server.lifetime import REASON, EndingServer, EndsWithItsClient, OpenAnswers

pytest.importorskip("fastapi")
MESSAGES = [{"role": "user", "content": "count from 3 to 7"}]


@pytest.mark.parametrize("settings", [{}, pytest.param({"encoder_repetition_penalty": 1.1}, marks=pytest.mark.slow)],
                         ids=["engine", "generate"])
def test_open_answers_end_with_a_reason_and_the_process_with_0(trained_path, tmp_path, settings):
    server = ServerProcess(trained_path, log=tmp_path / "log")
    try:
        begun = threading.Semaphore(0)
        body = {"ignore_eos": True, "structured_outputs": {"regex": "[0-9]*"},
                "generation_config": json.dumps({"max_new_tokens": 900, **settings})}

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

        count = 1 if settings else 3
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


def test_a_stream_that_is_cut_has_the_end_of_a_stream():
    answers, sent = OpenAnswers(), []

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        answers.end()
        await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(EndsWithItsClient(endless, answers)({"type": "http", "method": "POST", "headers": []}, receive, send))
    [failure, end] = sent[-1]["body"].decode().split("\n\n", 1)
    assert REASON in failure and end == "data: [DONE]\n\n" and not sent[-1].get("more_body")


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [100, 101])
def test_a_body_over_the_limit_is_refused_and_not_kept(announced, size):
    """By its Content-Length before any of it comes, else by the piece with which it is too long."""
    pieces, sent, bodies = [b"x" * 40, b"x" * 40, b"x" * (size - 80), b"never"], [], []

    async def echo(scope, receive, send):
        message = {"more_body": True}
        while message["more_body"]:
            message = await receive()
            bodies.append(message["body"])
        await JSONResponse(len(b"".join(bodies)))(scope, receive, send)

    async def receive():
        if len(pieces) == 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": len(pieces) > 1}

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", str(size).encode())] if announced else []
    scope = {"type": "http", "method": "POST", "headers": headers}
    asyncio.run(EndsWithItsClient(echo, OpenAnswers(), max_body_bytes=100)(scope, receive, send))
    said = json.loads(sent[-1]["body"])
    if size == 100:
        assert (sent[0]["status"], said) == (200, 100)
        return
    assert sent[0]["status"] == 413 and said["error"]["type"] == "invalid_request_error"
    assert "101 or more bytes, expected at most 100 (--max-body-bytes)" in said["detail"]
    assert len(pieces) == (4 if announced else 1) and len(bodies) == (0 if announced else 2)


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    left, timers, ran = [], [], []
    monkeypatch.setattr(lifetime.uvicorn.Server, "run", lambda self: ran.append("server"))
    monkeypatch.setattr(lifetime.atexit, "_run_exitfuncs", lambda: ran.append("exit functions"))
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(lifetime.threading, "Timer", lambda *arguments: timers.append(arguments) or threading.Thread())
    server = EndingServer(lifetime.uvicorn.Config(None), OpenAnswers())
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
