"""What a request asks for besides a GenerationConfig: each option at every entry, and what is refused there."""

from __future__ import annotations

import functools
import inspect
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_idle, byte_generator, left_padded, random_prompts, run_out, tiny_model
from transformers import GenerationConfig, LogitsProcessor

from hf_paged import PagedGenerator, UnsupportedOptionError
from hf_paged.engine.engine import Engine
from hf_paged.engine.features.deadlines import Deadlines
from hf_paged.options.request_spec import PLAIN

shared_model = functools.cache(tiny_model)
PROMPTS = random_prompts([20, 5, 33, 16, 1])
SAMPLED = {"do_sample": True, "seed": 3, "temperature": 1.3, "top_k": 0}
# Of every option: a value that shows, and values that are refused.
VALUES = {
    "logprobs": (2, [-1, 129, 2.5, "yes"]),
    "top_logprobs": (2, [-1, 129, True, "2"]),
    "prompt_logprobs": (2, [-1, 129, 2.5, "yes"]),
    "presence_penalty": (2.0, [2.1, -3, "1", None, float("nan"), True]),
    "frequency_penalty": (-2.0, [2.1, -3, "1", None, float("nan"), True]),
    "stop_token_ids": ([7], [7, "7", [256], [-1], [1.5], [True]]),
    "include_stop_str_in_output": (False, [None, 1, "no"]),
    "skip_special_tokens": (False, [None, 0, "no"]),
    "timeout": (1e-6, [0, -1.0, "1", True, float("inf"), float("nan"), 10**400]),
    "on_weight_change": ("keep", ["never", 1]),
}
WITH_IT = {"top_logprobs": {"logprobs": True}}

generator = pytest.fixture(byte_generator, scope="module", name="generator")


def test_every_option_is_here_and_at_every_entry():
    """Another option has to be given values above, and an argument of each of these."""
    assert set(VALUES) == set(PLAIN)
    for entry in (PagedGenerator.generate, PagedGenerator.stream, Engine.add_request):
        found = inspect.signature(entry).parameters
        assert set(VALUES) <= set(found)
        assert {name: found[name].default for name in VALUES} == PLAIN


def bare(spec):
    """What a request asks for besides its prompt and random numbers."""
    return spec.but(prompt=[], index=0, seed=0)


@pytest.mark.parametrize("name", VALUES)
def test_each_entry_hands_an_option_to_its_requests(generator, monkeypatch, name):
    """What the engine gets is the same from everywhere, and not what it gets without the option."""
    engine, seen = generator.engine, []
    value, keywords = VALUES[name][0], {"max_new_tokens": 2, **WITH_IT.get(name, {})}
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda session, new: seen.append(bare(new)) or add(session, new))
    generator.generate(PROMPTS[:1], **keywords, **{name: value})
    list(generator.stream(PROMPTS[:1], **keywords, **{name: value}))
    engine.add_request(PROMPTS[0], **keywords, **{name: value})
    generator.generate(PROMPTS[:2], **keywords, **{name: [value, PLAIN[name]]})
    run_out(engine)
    generator.generate(PROMPTS[:1], **keywords)
    first, *others, plain = seen
    assert others == [first, first, first, plain]
    assert first != plain


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in VALUES.items() for value in bad])
def test_a_wrong_value_is_named_before_anything_runs(generator, name, value):
    keywords = {"max_new_tokens": 2, **WITH_IT.get(name, {}), name: value}
    for call in (
        lambda: generator.generate(PROMPTS, **keywords),
        lambda: generator.generate([], **keywords),
        lambda: generator.generate(torch.tensor([[1, 2]]), **keywords),
        lambda: generator.stream(PROMPTS, **keywords),
        lambda: generator.engine.add_request(PROMPTS[0], **keywords),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}(=| holds).*expected"):
            call()
    assert not generator.engine.has_unfinished()


def test_one_value_per_prompt(generator):
    with pytest.raises(ValueError, match=r"^timeout: a list of 2 for 3 prompts"):
        generator.generate(PROMPTS[:3], max_new_tokens=2, timeout=[1.0, 2.0])
    failed, other = generator.generate(PROMPTS[:2], max_new_tokens=2, presence_penalty=[9, 0.5], on_error="complete")
    assert failed.error.startswith("ValueError: presence_penalty=9: expected a number in [-2, 2]")
    assert other.finish_reason == "length"


@pytest.mark.parametrize("keywords", [{name: value} for name, (value, _) in VALUES.items()] +
                         [{"best_of": 2}, {"priority": 1}])
def test_tensors_have_nowhere_to_put_them(generator, keywords):
    name = next(iter(keywords))
    given_too = {"max_new_tokens": 2, **WITH_IT.get(name, {})}
    with pytest.raises(ValueError, match=f"{name}.*tensors"):
        generator.generate(**left_padded(PROMPTS), **given_too, **keywords)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_config_cannot_bring_what_transformers_has_not(generator, name):
    """Stock ignores such a field; neither the engine nor `model.generate` drops it without a word."""
    config = GenerationConfig(max_new_tokens=2, **{name: 0.5})
    with pytest.raises(UnsupportedOptionError, match=rf"{name}=0\.5.*argument"):
        generator.generate(PROMPTS[:1], config)
    with pytest.warns(match=rf"{name}=0\.5.*argument"):
        generator.model.generate(torch.tensor(PROMPTS[:1]), generation_config=config)
    with pytest.raises(ValueError, match=name):
        generator.model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, **{name: 0.5})
    neutral = GenerationConfig(max_new_tokens=2, **{name: 0.0})
    assert len(generator.generate(PROMPTS[:1], neutral)[0].token_ids) == 2


# -- penalties ------------------------------------------


class Counted(LogitsProcessor):
    """OpenAI's penalties for one row, in float64 numpy."""

    def __init__(self, prompt_length, presence, frequency):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, ids, scores):
        counts = np.bincount(ids[0, self.prompt_length :].numpy(), minlength=scores.shape[1])
        known = scores[0].double().numpy() - counts * self.frequency - (counts > 0) * self.presence
        return torch.from_numpy(known).float()[None]


@settings(max_examples=15)
@given(st.floats(-2, 2, width=16), st.floats(-2, 2, width=16), st.sampled_from([1.0, 1.3]))
def test_penalties_are_those_of_the_definition(generator, presence, frequency, repetition):
    """Greedy tokens of rows side by side, against stock with a processor that counts."""
    made = generator.generate(PROMPTS, max_new_tokens=12, presence_penalty=presence, repetition_penalty=repetition,
                              frequency_penalty=[frequency, 0.0, frequency, frequency, 0.0])
    for index, (prompt, completion) in enumerate(zip(PROMPTS, made, strict=True)):
        own = 0.0 if index in (1, 4) else frequency
        expected = shared_model().generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12,
            repetition_penalty=repetition, logits_processor=[Counted(len(prompt), presence, own)],
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_count_through_preemption_and_continuation(overlap):
    keywords = {**SAMPLED, "max_new_tokens": 24, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": True}
    with PagedGenerator(tiny_model(), num_blocks=9, max_num_seqs=5, overlap=overlap) as tight:
        made = tight.generate(PROMPTS[:4], **keywords)
        assert tight.engine.stats().num_preemptions > 0
    with PagedGenerator(tiny_model(), overlap=overlap) as wide:
        whole = wide.generate(PROMPTS[:4], **keywords)
        cut = [{"prompt_token_ids": one.prompt_token_ids, "output_token_ids": one.token_ids[:7]} for one in whole]
        plain = wide.generate(PROMPTS[:4], **{**keywords, "frequency_penalty": 0.0, "presence_penalty": 0.0})
        again = wide.generate(cut, **keywords)
    assert [one.token_ids for one in made] == [one.token_ids for one in whole] == [one.token_ids for one in again]
    assert [one.token_ids for one in plain] != [one.token_ids for one in whole]
    for one, other in zip(again, whole, strict=True):
        assert one.logprobs[7:] == pytest.approx(other.logprobs[7:], abs=1e-4)


# -- time ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_whose_time_is_over_gives_its_blocks_back_within_a_step(overlap):
    with PagedGenerator(tiny_model(), overlap=overlap, max_num_seqs=2) as generator:
        engine = generator.engine
        config = GenerationConfig(max_new_tokens=200)
        late = engine.add_request(PROMPTS[0], config, timeout=0.2)
        other = engine.add_request(PROMPTS[1], GenerationConfig(max_new_tokens=10))
        waiting = engine.add_request(PROMPTS[2], config, timeout=0.2)  # there is no slot for it
        outputs = engine.step() + engine.step()
        used = engine.stats().num_blocks - engine.stats().num_free_blocks
        time.sleep(0.25)
        outputs += engine.step() + engine.step()
        ended = {output.request_id: output.completion for output in outputs if output.completion}
        assert set(ended) == {late, waiting}
        assert {one.finish_reason for one in ended.values()} == {"timeout"}
        assert 1 <= len(ended[late].token_ids) <= 3 and ended[late].error is None
        assert (ended[waiting].token_ids, ended[waiting].timings.started) == ([], None)
        assert engine.stats().num_blocks - engine.stats().num_free_blocks < used
        run_out(engine, outputs)
        assert outputs[-1].request_id == other and outputs[-1].finish_reason == "length"
        assert_idle(generator.model)


def test_time_counts_once_and_for_its_own_request(generator):
    """An id that is used again has no deadline of before; one that ended in time has none left."""
    engine = generator.engine
    engine.add_request(PROMPTS[0], max_new_tokens=2, timeout=0.1, request_id="a")
    run_out(engine)
    assert not engine._core.features[Deadlines].requests
    engine.add_request(PROMPTS[0], max_new_tokens=3, request_id="a")
    time.sleep(0.11)
    outputs = run_out(engine)
    assert outputs[-1].finish_reason == "length"


def test_times_that_differ_by_prompt(generator):
    made = generator.generate(PROMPTS[:3], max_new_tokens=20, timeout=[None, 1e-6, 1000])
    assert [one.finish_reason for one in made] == ["length", "timeout", "length"]


def test_priorities_are_an_order_of_the_call():
    with PagedGenerator(tiny_model(), max_num_seqs=1) as generator:
        made = generator.generate(PROMPTS[:4], max_new_tokens=3, priority=[2, 0, 1, -5])
        assert sorted(range(4), key=lambda i: made[i].timings.started) == [3, 1, 2, 0]
        with pytest.raises(TypeError, match=r"^priority=1.5: expected an integer"):
            generator.generate(PROMPTS[:2], max_new_tokens=3, priority=1.5)
        with pytest.raises(ValueError, match=r"^priority=.*expected an integer in"):
            generator.generate(PROMPTS[:2], max_new_tokens=3, priority=[1, 2**70])


# -- scoring only ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8}])
def test_prompts_are_scored_and_nothing_is_drawn(overlap, options):
    with PagedGenerator(tiny_model(), overlap=overlap, **options) as generator:
        whole = generator.generate(PROMPTS, max_new_tokens=1, prompt_logprobs=3)
        before = generator.engine.stats().num_generated_tokens
        made = generator.generate(PROMPTS, max_new_tokens=0, prompt_logprobs=3)
        assert generator.engine.stats().num_generated_tokens == before
        for one, other in zip(made, whole, strict=True):
            assert (one.token_ids, one.finish_reason, one.logprobs) == ([], "length", None)
            assert one.timings.first_token is None and one.timings.started is not None
            assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)
            assert list(map(set, one.prompt_top_logprobs[1:])) == list(map(set, other.prompt_top_logprobs[1:]))
        mixed = generator.generate([PROMPTS[0]], max_new_tokens=4)
        assert len(mixed[0].token_ids) == 4
        assert_idle(generator.model)


def test_scored_prompts_beside_requests_that_go_on(generator):
    engine = generator.engine
    long = engine.add_request(PROMPTS[0], max_new_tokens=8)
    engine.step()
    scored = engine.add_request(PROMPTS[1], max_new_tokens=0, prompt_logprobs=True)
    completions = {}
    completions |= {o.request_id: o.completion for o in run_out(engine) if o.completion}
    assert len(completions[long].token_ids) == 8
    assert completions[scored].token_ids == [] and None not in completions[scored].prompt_logprobs[1:]
    [again] = generator.generate([completions[scored]], max_new_tokens=0, prompt_logprobs=True)
    assert again.prompt_logprobs[1:] == pytest.approx(completions[scored].prompt_logprobs[1:], abs=1e-4)


@pytest.mark.parametrize("keywords", [{}, {"logprobs": 3}, {"prompt_logprobs": False}])
def test_nothing_to_generate_and_nothing_to_score(generator, keywords):
    for call in (lambda: generator.generate(PROMPTS, max_new_tokens=0, **keywords),
                 lambda: generator.engine.add_request(PROMPTS[0], max_new_tokens=0, **keywords)):
        with pytest.raises(ValueError, match=r"^max_new_tokens=0: expected at least 1, or prompt_logprobs with it"):
            call()
    with pytest.raises((TypeError, ValueError)):
        generator.engine.add_request(PROMPTS[0], max_new_tokens=False, prompt_logprobs=True)


# -- best of several ------------------------------------------


def test_the_best_of_the_candidates_come_first(generator):
    keywords = {**SAMPLED, "max_new_tokens": 6}
    every = generator.generate(PROMPTS[:2], num_return_sequences=5, logprobs=True, **keywords)
    best = generator.generate(PROMPTS[:2], num_return_sequences=2, best_of=5, **keywords)
    for number in range(2):
        ranked = sorted(every[5 * number : 5 * number + 5], key=lambda one: -sum(one.logprobs))
        found = best[2 * number : 2 * number + 2]
        assert [one.token_ids for one in found] == [one.token_ids for one in ranked[:2]]
        assert [one.cumulative_logprob for one in found] == pytest.approx([sum(one.logprobs) for one in ranked[:2]])
    mixed = generator.generate(PROMPTS[:2], best_of=[None, 3], **keywords)
    assert len(mixed) == 2 and mixed[0].logprobs is None and mixed[1].logprobs is not None


def test_candidates_that_failed_come_last(generator):
    made = generator.generate(PROMPTS[:1], best_of=3, num_return_sequences=3, timeout=1e-6, max_new_tokens=9, **SAMPLED)
    assert [one.finish_reason for one in made] == ["timeout"] * 3
    bad, good = generator.generate([[1] * 99_999, PROMPTS[0]], best_of=3, max_new_tokens=2, on_error="complete",
                                   **SAMPLED)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")


@pytest.mark.parametrize(("keywords", "words"), [
    ({"best_of": 1, "num_return_sequences": 2, **SAMPLED}, "expected at least num_return_sequences=2"),
    ({"best_of": 2}, "do_sample=True"), ({"best_of": 0}, "at least 1"), ({"best_of": 2.0}, "integer"),
    ({"best_of": True}, "integer"),
])
def test_numbers_of_candidates_that_are_refused(generator, keywords, words):
    with pytest.raises(ValueError, match=f"best_of=.*{words}"):
        generator.generate(PROMPTS[:1], max_new_tokens=2, **keywords)
