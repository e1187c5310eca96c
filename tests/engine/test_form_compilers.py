"""Forms compiled by processes: limits of time, memory and recursion, sharing, cancelling, and ends of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from support import byte_tokenizer, random_prompts, tiny_model

from hf_paged import PagedGenerator
from hf_paged.config import PagedConfig
from hf_paged.engine import grammars as grammars_module
from hf_paged.engine.form_compilers import COMPILERS
from hf_paged.engine.form_process import _Process
from hf_paged.engine.form_queue import Job
from hf_paged.engine.grammars import Grammars
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
    pid = COMPILERS._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


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
    COMPILERS._process.kill()
    assert waiter.result(timeout=30) is not None  # compiled by this one
    assert settles(lambda: COMPILERS._process is None)
    assert grammars.compile(Structured("regex", "[0-9]{7}"), TOKENIZER) is not None
    assert COMPILERS._process.poll() is None


def test_without_a_process_forms_are_compiled_here(monkeypatch):
    def refuse():
        raise OSError("none here")

    monkeypatch.setattr(COMPILERS, "start", refuse)
    assert Grammars(256, PagedConfig()).compile(QUICK, TOKENIZER) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_a_process_of_its_own():
    grammars = made()
    mine = COMPILERS._process.pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            grammars.compile(Structured("regex", "[0-9]{8}"), TOKENIZER)
            code = 0 if COMPILERS._process.pid != mine else 2
            COMPILERS.stop()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert COMPILERS._process.pid == mine and grammars.compile(Structured("regex", "[0-9]{9}"), TOKENIZER) is not None


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
