"""A request ends once, and wholly, whatever ends it and wherever it is: queued, running, or queued anew."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support import (
    Interrupt,
    assert_idle,
    byte_tokenizer,
    interrupted,
    interrupted_behind,
    random_prompts,
    tiny_model,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged.engine.features.deadlines import Deadlines

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

PROMPTS = random_prompts([20, 9, 33], seed=2)
LENGTH = 6
FILES = ("/loop.py", "/engine_state.py", "/prepared_model.py", "/session.py",
         *(f"/features/{name}.py" for name in
           ("feature_set", "adapters", "log_probs", "streaming", "text", "versions")))
LENT = ("q_proj", "v_proj")  # the modules of the adapter that comes and goes


@pytest.fixture(scope="module")
def wrapped() -> Any:
    """A model whose adapter "own" is active; "lent" is named by requests alone."""
    return with_adapter(with_adapter(tiny_model(), "own", 5), "lent", 6, LENT)


@pytest.fixture(scope="module")
def expected(wrapped) -> dict[tuple[int, str | None], list[int]]:
    """What the model's own modules make of each prompt under each adapter."""
    made = {}
    for number, prompt in enumerate(PROMPTS):
        for name in (None, "lent"):
            wrapped.set_adapter(name or "own")
            ids = wrapped.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False)
            made[number, name] = ids[0, len(prompt) :].tolist()
    wrapped.set_adapter("own")
    return made


def innocent(wrapped: Any, number: int = 1) -> list[int]:
    """The new tokens of a call that has nothing to do with anybody's requests."""
    ids = wrapped.generate(torch.tensor([PROMPTS[number]]), max_new_tokens=LENGTH)
    return ids[0, len(PROMPTS[number]) :].tolist()


def completions(engine: Any) -> list[Any]:
    """Of each request of `add_request` its completion, with its id."""
    done: list[Any] = []
    for _ in range(100):
        if not engine.has_unfinished():
            return done
        done += [(one.request_id, one.completion) for one in engine.step() if one.completion is not None]
    raise AssertionError(f"requests that never end: {list(engine._core.requests)}")


def test_a_request_that_was_aborted_before_it_was_received_and_whose_adapter_is_gone(wrapped, expected):
    engine = hf_paged.get_engine(hf_paged.enable(wrapped, strict=True))
    config = GenerationConfig(max_new_tokens=LENGTH)
    aborted = engine.add_request(PROMPTS[0], config, adapter_name="lent")
    other = engine.add_request(PROMPTS[2], config)
    wrapped.delete_adapter("lent")
    engine.abort(aborted)
    try:
        assert innocent(wrapped) == expected[1, None]
        done = completions(engine)
        assert sorted((name, one.finish_reason) for name, one in done) == [(aborted, "abort"), (other, "length")]
        assert dict(done)[other].token_ids == expected[2, None]
        assert_idle(wrapped.get_base_model())
    finally:
        hf_paged.disable(wrapped)
        with_adapter(wrapped, "lent", 6, LENT)


# -- one end -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    model = hf_paged.enable(tiny_model(), strict=True)
    yield hf_paged.get_engine(model)
    hf_paged.disable(model)


def queued(engine: Any, **options: Any) -> Any:
    key = engine.add_request(PROMPTS[1], GenerationConfig(max_new_tokens=LENGTH), **options)
    return engine._core.requests[key]


def test_no_part_of_the_table_keeps_what_was_removed(engine):
    """Whatever parts it has."""
    core, request = engine._core, queued(engine, timeout=100.0)
    parts = [part for part in vars(core).values() if isinstance(part, Mapping) and request.request_id in part]
    parts += [feature.requests for feature in request.features]
    assert len(parts) == 3 + 4 and all(request.request_id in part for part in parts) and core.has(request)
    core.drop(request)
    assert not any(map(len, parts)) and not core.has(request) and not request.session.open
    core.drop(request)


def test_to_end_a_request_again_changes_nothing(engine):
    request, other = queued(engine), queued(engine)
    for reason in ("abort", "timeout"):
        engine._core.end(request, reason, error=None)
    engine._core.end(request, "error", "too late")
    engine._core.refuse(request, "too late")
    done = completions(engine)
    assert [(name, one.finish_reason, one.error) for name, one in done] == [
        (request.request_id, "abort", None), (other.request_id, "length", None)]
    assert_idle(engine.model)


def test_one_that_is_dropped_from_the_table_is_not_the_next_one_of_its_id(engine):
    first = queued(engine, request_id="same")
    engine.abort("same")
    second = queued(engine, request_id="same")
    engine._core.drop(first)
    engine._core.end(first, "abort")
    assert engine._core.has(second)
    assert [one.finish_reason for _, one in completions(engine)] == ["abort", "length"]


def test_times_that_are_over(engine):
    core, deadlines = engine._core, engine._core.features[Deadlines]
    slow, quick, _ = queued(engine, timeout=0.5), queued(engine, timeout=1e-9), queued(engine)
    assert deadlines.due() == [quick]
    core.drop(quick)
    assert deadlines.due() == []
    core.dirty = True  # as an interrupt leaves it
    core.recover_if_dirty()
    time.sleep(0.5)
    assert deadlines.due() == [slow]


def test_an_abort_that_is_interrupted_ends_a_request_once_or_not_at_all(engine):
    queued(engine)
    [(_, whole)] = completions(engine)
    reasons = []
    for at in itertools.count(1):
        key = queued(engine).request_id
        engine.step()
        with suppress(Interrupt), interrupted_behind(at, *FILES) as places:
            engine.abort(key)
        [(name, one)] = completions(engine)
        assert name == key and one.token_ids == whole.token_ids[: len(one.token_ids)]
        reasons.append(one.finish_reason)
        if len(places) < at:
            break
    assert set(reasons) == {"abort", "length"} and len(reasons) > 10
    assert_idle(engine.model)


def test_a_tokenizer_may_abort_requests_in_the_middle_of_a_step(engine):
    tokenizer, aborted = byte_tokenizer(), []
    decode = tokenizer.decode

    def aborting(*args, **kwargs):
        if not aborted:
            aborted.append(other.request_id)
            engine.abort(other.request_id)
        return decode(*args, **kwargs)

    tokenizer.decode = aborting
    engine.tokenizer = tokenizer
    ended, other = queued(engine, max_new_tokens=2), queued(engine)
    assert {name: one.finish_reason for name, one in completions(engine)} == {
        ended.request_id: "length", other.request_id: "abort"}
    assert_idle(engine.model)


# -- anything, in any order --------------------------------------------------------------------------------------------


class Requests(RuleBasedStateMachine):
    """Requests come and are aborted while their adapter comes and goes, and other callers' calls are interrupted."""

    wrapped: Any
    expected: dict[tuple[int, str | None], list[int]]

    @initialize(blocks=st.sampled_from([8, 64]), overlap=st.booleans())
    def start(self, blocks, overlap):
        self.engine = hf_paged.get_engine(
            hf_paged.enable(self.wrapped, strict=True, num_blocks=blocks, overlap=overlap))
        self.open: dict[str, tuple[list[int], set[str]]] = {}  # the tokens, and the reasons for which it may end
        self.is_lent, self.count = True, 0

    @rule(what=st.sampled_from(["add"] * 3 + ["abort", "lend"] * 3 + ["interrupt", "generate", "step", "write"]),
          number=st.integers(0, 2), name=st.sampled_from([None, "lent", "lent"]), at=st.integers(1, 500))
    def do(self, what, number, name, at):
        """One rule, as Hypothesis leaves out some rules of several in each run."""
        getattr(self, what)(number=number, name=name, at=at)

    def add(self, number, name, at):
        if name is not None and not self.is_lent:
            self.lend()
        self.count, timeout = self.count + 1, 1e-6 if at % 7 == 0 else None
        key = self.engine.add_request(PROMPTS[number], GenerationConfig(max_new_tokens=LENGTH), adapter_name=name,
                                      timeout=timeout, request_id=f"{self.count} {name}")
        self.open[key] = self.expected[number, name], {"length" if timeout is None else "timeout"}

    def abort(self, number, at, **_):
        """Perhaps interrupted, which may come before anything was done or after it."""
        if self.open:
            key = list(self.open)[-1 if at % 2 else 0]
            self.open[key][1].add("abort")
            with suppress(KeyError, Interrupt), interrupted(at // 5 if number == 0 else None):
                self.engine.abort(key)  # KeyError: it has ended in a step of others

    def lend(self, **_):
        """Or take it back."""
        if self.is_lent:
            self.wrapped.delete_adapter("lent")
            for key, (_, reasons) in self.open.items():
                reasons |= {"error"} if key.endswith("lent") else set()
        else:
            with_adapter(self.wrapped, "lent", 6, LENT)
        self.is_lent = not self.is_lent

    def write(self, **_):
        with self.engine.weight_update():
            pass

    def interrupt(self, at, **_):
        with suppress(Interrupt), interrupted(at):
            innocent(self.wrapped)

    def generate(self, number, **_):
        assert innocent(self.wrapped, number) == self.expected[number, None]

    def step(self, **_):
        self.take(self.engine.step())

    def take(self, outputs):
        for one in outputs:
            if (completion := one.completion) is not None:
                tokens, reasons = self.open.pop(one.request_id)
                assert completion.finish_reason in reasons, completion
                assert completion.finish_reason != "length" or completion.token_ids == tokens
                assert completion.token_ids == tokens[: len(completion.token_ids)]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            while self.engine.has_unfinished():
                self.take(self.engine.step())
            assert not self.open
            innocent(self.wrapped)  # the end of a call that was interrupted in its very end
            assert not self.engine._core.requests
            assert_idle(self.wrapped.get_base_model())
        finally:
            hf_paged.disable(self.wrapped)
            if not self.is_lent:
                with_adapter(self.wrapped, "lent", 6, LENT)


def test_requests_end_once_whatever_comes_in_whatever_order(wrapped, expected):
    Requests.wrapped, Requests.expected = wrapped, expected
    run_state_machine_as_test(Requests, settings=settings(max_examples=30, stateful_step_count=16, deadline=None))
