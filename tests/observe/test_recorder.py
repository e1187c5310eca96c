"""What is recorded of steps and requests: every token once, with the times of the steps, over all that may happen."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import Interrupt, batch, interrupted, random_prompts, run_out, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.observe.metrics import TOKEN_SECONDS, Histogram, Recorder
from hf_paged.observe.work import sizes_of

shared_model = functools.cache(tiny_model)


def recorder_of(engine):
    return Recorder(sizes_of(engine.model, engine.cache_spec, 1), None)


class ByHand:
    """The times between tokens, request by request, in plain dictionaries."""

    def __init__(self):
        self.gaps, self.latest, self.open = [], {}, set()

    def queued(self, request):
        self.open.add(request.request_id)

    def launched(self, step):
        pass

    def committed(self, step):
        for row in step.accepted.tolist():
            key = step.plan.sequences[row].request_id
            if key in self.latest:
                self.gaps.append(step.ready - self.latest[key])
            self.latest[key] = step.ready

    def finished(self, request, output):
        self.open.discard(request.request_id)
        self.latest.pop(request.request_id, None)

    def started_over(self, unfinished):
        self.latest = {}


def counts(histogram):
    return [count for _, count in histogram.buckets()]


def total(histogram):
    return counts(histogram)[-1]


@settings(max_examples=12)
@example(seed=1, num_blocks=9, slots=4, overlap=True, interrupts=False)
@example(seed=2, num_blocks=9, slots=4, overlap=True, interrupts=True)
@given(seed=st.integers(0, 2**16), num_blocks=st.sampled_from([9, 60]), slots=st.sampled_from([2, 4, 12]),
       overlap=st.booleans(), interrupts=st.booleans())
def test_times_between_tokens_are_those_counted_one_by_one(seed, num_blocks, slots, overlap, interrupts):
    """Over preemption, aborts, ids that come again, arrivals at any time, and interrupts."""
    rng = random.Random(seed)
    hf_paged.enable(shared_model(), num_blocks=num_blocks, max_num_seqs=slots, overlap=overlap)
    engine = hf_paged.get_engine(shared_model())
    recorder, by_hand = recorder_of(engine), ByHand()
    engine.watch(recorder)
    engine.watch(by_hand)
    try:
        for round_ in range(4):
            lengths = [rng.randrange(1, 50) for _ in range(8)]
            for number, prompt in enumerate(random_prompts(lengths, seed=seed + round_)):
                engine.add_request(prompt, GenerationConfig(max_new_tokens=rng.randrange(1, 30)),
                                   request_id=f"{round_ % 2}-{number}")
            for _ in range(rng.randrange(40)):
                engine.step()
            if by_hand.open and rng.random() < 0.5:
                engine.abort(rng.choice(sorted(by_hand.open)))
            try:
                with interrupted(rng.randrange(1, 3000) if interrupts else None):
                    run_out(engine)
            except Interrupt:
                pass
            run_out(engine)
        expected = Histogram(TOKEN_SECONDS)
        for gap in by_hand.gaps:
            expected.add(gap)
        assert counts(recorder.inter_token) == counts(expected)
        assert recorder.inter_token.sum == pytest.approx(sum(by_hand.gaps))
        assert not recorder._open and not recorder._awaited and not recorder._left
        if not interrupts:
            assert sum(recorder.finished_by.values()) == 32
            assert total(recorder.latency) == 32 and total(recorder.first_token) <= 32
            assert total(recorder.first_token) == total(recorder.decode) == total(recorder.prefill)
    finally:
        hf_paged.disable(shared_model())


def test_tokens_that_come_together_share_the_time_since_the_one_before(monkeypatch):
    prompts = random_prompts([9, 20])
    with hf_paged.PagedGenerator(tiny_model()) as generator:
        outputs = {tuple(one.prompt_token_ids): one.token_ids
                   for one in generator.generate(prompts, max_new_tokens=20)}
        monkeypatch.setattr("hf_paged.engine.features.drafts.Speculation.drafts", lambda self, *_: {
            r.sequence.slot: outputs[tuple(r.sequence.prompt_token_ids)][r.sequence.num_output_tokens :][:3]
            for r in self._running.values() if r.sequence.num_output_tokens
        })
        recorder, steps = recorder_of(generator.engine), []

        class Steps:
            def committed(self, step):
                steps.append(step)

        generator.engine.watch(recorder)
        generator.engine.watch(Steps())
        generator.generate(prompts, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert len(steps) == 6  # of one token, and of four
    assert total(recorder.inter_token) == 2 * 19
    gaps = np.diff([step.ready for step in steps])
    assert recorder.inter_token.sum == pytest.approx(2 * gaps[:-1].sum() + 2 * gaps[-1])
    expected = Histogram(TOKEN_SECONDS)
    for gap, count in zip(gaps, (4, 4, 4, 4, 3), strict=True):
        for _ in range(2 * count):
            expected.add(gap / count)
    assert counts(recorder.inter_token) == counts(expected)


def test_times_of_requests_are_those_of_their_completions():
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=60, max_num_seqs=2) as generator:
        recorder = recorder_of(generator.engine)
        generator.engine.watch(recorder)
        made = generator.generate(random_prompts([9, 30, 4, 17]), max_new_tokens=5)
        times = [one.timings for one in made]
        for histogram, spans in (
            (recorder.first_token, [t.first_token - t.queued for t in times]),
            (recorder.latency, [t.ended - t.queued for t in times]),
            (recorder.queue, [t.started - t.queued for t in times]),
            (recorder.prefill, [t.first_token - t.started for t in times]),
            (recorder.decode, [t.ended - t.first_token for t in times]),
            (recorder.per_token, [(t.ended - t.first_token) / 4 for t in times]),
        ):
            assert histogram.sum == pytest.approx(sum(spans)) and total(histogram) == 4
        assert recorder.prompt_tokens.sum == 60 and recorder.generation_tokens.sum == 20
        assert recorder.step_tokens.sum == 60 + 16
        assert recorder.finished_by == {"eos": 0, "stop": 0, "length": 4, "timeout": 0, "abort": 0,
                                            "error": 0}


def test_one_that_comes_while_requests_run_counts_what_it_sees():
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=60) as generator:
        recorder = recorder_of(generator.engine)
        stream = generator.stream(random_prompts([9, 30]), max_new_tokens=10)
        for _ in range(8):  # tokens 1 to 4 of both
            next(stream)
        generator.engine.watch(recorder)
        list(stream)
        assert total(recorder.inter_token) == 10  # between tokens 5 to 10
        assert total(recorder.first_token) == 0 and total(recorder.latency) == 2


def test_a_histogram_counts_as_one_value_after_the_other():
    rng = np.random.default_rng(0)
    one, many = Histogram(TOKEN_SECONDS), Histogram(TOKEN_SECONDS)
    values = np.concatenate([rng.exponential(0.05, 500), np.array(TOKEN_SECONDS), [1000.0]])
    for value in values:
        one.add(float(value))
    for piece in np.split(values, [1, 3, 3, 400]):
        many.add_all(piece)
    many.add_all(np.full(7, 0.02))
    for _ in range(7):
        one.add(0.02)
    assert one.buckets() == many.buckets() and one.sum == pytest.approx(many.sum)
    assert many.buckets()[-1] == ("+Inf", len(values) + 7)
    at_bound = Histogram((1.0, 2.0))
    at_bound.add(1.0)
    assert at_bound.buckets() == [("1.0", 1), ("2.0", 1), ("+Inf", 1)]  # up to the bound, that included


def test_rows_in_lockstep_are_work_but_no_requests(lockstep_only):
    hf_paged.enable(shared_model())
    try:
        engine = hf_paged.get_engine(shared_model())
        recorder = recorder_of(engine)
        engine.watch(recorder)
        shared_model().generate(**batch([9, 9]), max_new_tokens=4)
        assert recorder.work.flops > 0 and recorder.step_tokens.sum >= 6
        assert total(recorder.inter_token) == total(recorder.latency) == 0
    finally:
        hf_paged.disable(shared_model())
