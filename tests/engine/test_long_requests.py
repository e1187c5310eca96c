"""What a step costs the host does not grow with the context: counted in bytecodes and in bytes, not in seconds.

The model's layers give zeros, so that a prompt of 128k tokens passes in seconds. All else is real: engine, scheduler,
prefix cache, block tables, uploads, sampling.
"""

from __future__ import annotations

import sys
import tracemalloc
from typing import NamedTuple

import pytest
import torch
from pairs import slow_but
from support import random_prompts, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator

SHORT, LONG, CHUNK = 1 << 10, 1 << 17, 1 << 13
NEW = 50  # of them two blocks are filled, and a third is begun


class Work(NamedTuple):
    """Of one step of the host: bytecodes of Python, and the most bytes that it held besides what was there."""

    bytecodes: int
    nbytes: int

    def is_about(self, others: list[Work]) -> bool:
        """No more than these; lists that grow by an eighth when they are full, as Python's, take some kilobytes."""
        most = Work(*map(max, zip(*others, strict=True)))
        return self.bytecodes <= 1.2 * most.bytecodes + 1000 and self.nbytes <= 1.2 * most.nbytes + 32_000


def work_of(call) -> Work:
    """What numpy and lists take counts as bytes; torch's memory does not."""
    count = 0

    def local(_frame, event, _argument):
        nonlocal count
        count += event == "opcode"
        return local

    def begin(frame, _event, _argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    traced = sys.gettrace()
    sys.settrace(begin)
    try:
        call()
    finally:
        sys.settrace(traced)
    return Work(count, tracemalloc.get_traced_memory()[1] - before)


@pytest.fixture
def memory():
    """Allocations are traced."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def long_engine(monkeypatch, **paged):
    """The generator that keeps the model alive, and its engine."""
    settings = {"max_num_seqs": 8, "max_model_len": LONG + 1024, "num_blocks": 9000}
    generator = PagedGenerator(tiny_model(), **settings | paged)
    hidden = torch.zeros(CHUNK, generator.model.config.hidden_size)
    monkeypatch.setattr(generator.engine._executor, "hidden_states",
                        lambda ids, step: hidden[: len(ids if step.wanted is None else step.wanted)])
    return generator, generator.engine


def steps_of(engine, prompt, options) -> list[Work]:
    """Each step of one request."""
    options, works = dict(options), []
    config = GenerationConfig(max_new_tokens=NEW, **options.pop("config", {}))
    engine.add_request(prompt, config, **options)
    while engine.has_unfinished():
        works.append(work_of(engine.step))
    return works


REQUESTS = {
    "greedy": {},
    "options": {"config": {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "max_time": 1000.0},
                "seed": 3, "logprobs": 3},
    "guesses": {"config": {"prompt_lookup_num_tokens": 4}},
}


@pytest.mark.parametrize("name", slow_but(REQUESTS, "greedy"))
def test_decode_steps_and_chunks_cost_as_much_behind_128k_tokens_as_behind_one(monkeypatch, memory, name):
    (_generator, engine), options = long_engine(monkeypatch), REQUESTS[name]
    short, long = random_prompts([SHORT, LONG])
    steps_of(engine, short[:40], options)  # what is made once
    # The first step takes the request in, and the last one gives its blocks back.
    steps = steps_of(engine, short, options)[1:-1]
    works = steps_of(engine, long, options)
    chunks, behind = works[1 : LONG // CHUNK], works[LONG // CHUNK : -1]
    for work in behind:
        assert work.is_about(steps), (work, steps)
    for work in chunks:
        assert work.is_about(chunks[:1]), (work, chunks)
