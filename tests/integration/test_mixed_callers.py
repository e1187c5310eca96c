"""Callers of every kind at once over one engine: native rows, rows whose tokens stock's loop picks, beams, drafts.

Each gets stock's tokens, whatever the others do, nobody waits for ever, and nothing stays taken.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import pickle
import random
import threading
import time
from functools import cache
from queue import SimpleQueue

import invariants
import pytest
import torch
from pairs import slow_but
from support import Interrupt, assert_idle, assert_same_tensor, batch, interrupted, lent, stock_copy, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_paged

shared_model = functools.cache(tiny_model)
stock_model = functools.cache(lambda: stock_copy(shared_model()))

model = lent(shared_model)


class Enough(Exception):
    """Raised by a caller's own code."""


class Own(LogitsProcessor):
    """A processor of the caller's own: forbids the token that came last, and does `meanwhile` at one of its calls."""

    def __init__(self, meanwhile=lambda: None, at=2):
        self.calls, self.at, self.meanwhile = 0, at, meanwhile

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.at:
            self.meanwhile()
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class TwoFives(StoppingCriteria):
    """Ends a row whose last two tokens are both odd."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:] % 2).all(dim=1)


def own_processor(meanwhile=lambda: None):
    return {"logits_processor": LogitsProcessorList([Own(meanwhile)])}


def own_criterion(meanwhile=lambda: None):
    return {"stopping_criteria": StoppingCriteriaList([TwoFives()]), "pad_token_id": 0, "eos_token_id": 255,
            **own_processor(meanwhile)}


def scores(meanwhile=lambda: None):
    return {"encoder_repetition_penalty": 1.2, **own_processor(meanwhile)}


def beams(meanwhile=lambda: None):
    return {"num_beams": 3, **own_processor(meanwhile)}


def lookup(meanwhile=lambda: None):
    return {"prompt_lookup_num_tokens": 3, **own_processor(meanwhile)}


def native(meanwhile=lambda: None):
    return {}


KINDS = {kind.__name__: kind for kind in (native, own_processor, own_criterion, scores, beams, lookup)}


@cache
def call(kind: str, lengths: tuple[int, ...], new: int) -> tuple[dict, torch.Tensor]:
    """Inputs and what stock makes of them."""
    inputs = batch(list(lengths), seed=sum(lengths)) | {"max_new_tokens": new}
    return inputs, stock_model().generate(**inputs, **KINDS[kind]())


def joined(threads: list[threading.Thread], seconds: float = 60.0) -> None:
    """Wait for all; the stacks of those that hang are printed."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("callers wait for each other for ever")


def started(*actions) -> list[threading.Thread]:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.each_value
@pytest.mark.parametrize("waiting", [kind for kind in KINDS if kind not in ("native", "lookup")])
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("num_blocks", [None, 13], ids=["", "tiny"])
def test_a_processor_that_waits_for_another_threads_generate(model, waiting, other, num_blocks):
    """In the tiny pool the waiting call's rows have to give their blocks to the one that it waits for."""
    lengths = (60,) if waiting == "beams" else (60, 60)
    inputs, expected = call(waiting, lengths, 20)
    inner_lengths = (50,) if other in ("lookup", "beams") else (50, 50)
    inner_inputs, inner_expected = call(other, inner_lengths, 16)
    hf_paged.enable(model, strict=True, num_blocks=num_blocks)
    found = {}

    def inner():
        found["inner"] = model.generate(**inner_inputs, **KINDS[other]())

    def meanwhile():
        joined(started(inner), 30)

    def outer():
        found["outer"] = model.generate(**inputs, **KINDS[waiting](meanwhile))

    joined(started(outer))
    assert_same_tensor(found["inner"], inner_expected)
    assert_same_tensor(found["outer"], expected)
    assert_idle(model)
    invariants.check(hf_paged.get_engine(model)._core.scheduler)


def test_a_short_call_does_not_wait_for_a_long_one(model):
    """While a caller's own code runs, and while its rows are computed, others' requests come and go."""
    inputs, _ = call("own_processor", (20, 13), 40)
    short_inputs, short_expected = call("native", (9,), 4)
    hf_paged.enable(model, strict=True)
    found = []

    def meanwhile():
        for _ in range(3):
            found.append(model.generate(**short_inputs))

    model.generate(**inputs, **own_processor(meanwhile))
    ended = threading.Event()

    def long():
        model.generate(**inputs, logits_processor=LogitsProcessorList([Slow()]))
        ended.set()

    threads = started(long)
    while not ended.is_set() and len(found) < 8:
        found.append(model.generate(**short_inputs))
    assert not ended.is_set(), "the short calls came after the long one"
    joined(threads)
    assert len(found) == 8 and all(torch.equal(tokens, short_expected) for tokens in found)
    assert_idle(model)


class Slow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        time.sleep(0.02)
        return scores


def random_mix(model, seed: int) -> None:
    """Some threads with some calls each, in a pool of a random size.

    Some calls' own code raises in the middle, some are interrupted at any point of the package; meanwhile the model is
    copied and pickled.
    """
    pick = random.Random(seed)
    config = {
        "num_blocks": pick.choice([None, None, 14, 20, 40]), "max_num_seqs": pick.choice([1, 2, 5, 256]),
        "overlap": pick.random() < 0.5, "enable_prefix_caching": pick.random() < 0.7,
        "max_num_batched_tokens": pick.choice([256, 2048]),
    }
    hf_paged.enable(model, strict=True, **config)
    failures: SimpleQueue = SimpleQueue()

    def calls(plan):
        for kind, lengths, new, raises, at in plan:
            inputs, expected = call(kind, lengths, new)

            def meanwhile(raises=raises):
                if raises:
                    raise Enough

            try:
                with interrupted(at):
                    found = model.generate(**inputs, **KINDS[kind](meanwhile))
            except (Enough, Interrupt):
                continue
            except BaseException as error:
                failures.put((config, plan, repr(error)))
                raise
            if not torch.equal(found, expected):
                failures.put((config, plan, kind, lengths, found, expected))

    plans = []
    for _ in range(pick.randint(2, 4)):
        plan = []
        for _ in range(pick.randint(1, 3)):
            kind = pick.choice([*KINDS])
            choices = [(30,), (7,), (60,)] if kind in ("lookup", "beams") else [(30, 12, 5), (40,), (9, 9), (33, 64)]
            plan.append((kind, pick.choice(choices), pick.choice([3, 9, 24]), pick.random() < 0.2,
                         pick.choice([None, None, None, None, pick.randrange(1, 3000)])))
        plans.append(plan)
    for plan in plans:
        for kind, lengths, new, *_ in plan:
            call(kind, lengths, new)
    threads = started(*(lambda plan=plan: calls(plan) for plan in plans))
    if pick.random() < 0.3:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            inputs, expected = call("native", (9,), 3)
            assert type(copied) is type(stock_model())
            assert torch.equal(copied.generate(**inputs), expected)
    joined(threads, 20)
    assert failures.empty(), failures.get()
    inputs, expected = call("native", (9,), 3)
    while hf_paged.get_engine(model)._core.requests:  # an interrupt in a call's very end leaves its requests running
        assert torch.equal(model.generate(**inputs), expected)
    assert torch.equal(model.generate(**inputs, **own_processor()), expected)
    assert_idle(model)
    invariants.check(hf_paged.get_engine(model)._core.scheduler)


@pytest.mark.parametrize("first", slow_but(range(0, 24, 8), 0))
def test_random_mixes(model, first):
    for seed in range(first, first + 8):
        random_mix(model, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 100))
def test_many_random_mixes(model, first):
    for seed in range(first, first + 100):
        random_mix(model, seed)
