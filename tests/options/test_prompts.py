"""A request that was ended half-way and goes on from its tokens ends as if it had never been interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from option_cases import CASES, EOS, SAMPLED
from support import assert_idle, byte_generator, byte_tokenizer, random_prompts, tiny_model
from transformers import GenerationConfig

from hf_paged import Completion, PagedGenerator
from hf_paged.options import table

PROMPTS = [*random_prompts([20, 33]), [7]]
# Options that count from the end of the prompt: taking the output for prompt gives something else.
COUNT_FROM_THE_PROMPT = ("max_new_tokens", "min_new_tokens", "forced_eos_token_id", "exponential_decay_length_penalty",
                         "begin_suppress_tokens")

generator = pytest.fixture(byte_generator, scope="module", name="generator")


def interrupted(completion, count):
    """What an abort after this many tokens leaves."""
    return replace(completion, token_ids=completion.token_ids[:count], logprobs=completion.logprobs[:count], text=None,
                   finish_reason="abort", version_runs=())


def as_dict(completion):
    return {"prompt_token_ids": completion.prompt_token_ids, "output_token_ids": completion.token_ids}


def cuts(completion):
    length = len(completion.token_ids)
    return sorted({0, 1, 2, length // 2, length - 1, length} & set(range(length + 1)))


def assert_same_end(made, whole):
    assert (made.token_ids, made.text) == (whole.token_ids, whole.text)
    assert (made.finish_reason, made.prompt_token_ids) == (whole.finish_reason, whole.prompt_token_ids)
    assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert made.seed == whole.seed


@pytest.mark.parametrize("name", table.names(table.NATIVE))
def test_going_on_gives_what_an_uninterrupted_request_gives(generator, name):
    options = {"max_new_tokens": 14} | CASES[name]
    if name == "max_length":
        del options["max_new_tokens"]
    whole = generator.generate(PROMPTS, **options, seed=5, logprobs=True)
    options = {key: value for key, value in options.items() if key != "num_return_sequences"}
    parts = [(interrupted(one, count), one, count) for one in whole for count in cuts(one)]
    for made, (_, one, _) in zip(generator.generate([part for part, _, _ in parts], **options, seed=99, logprobs=True),
                                 parts, strict=True):
        assert_same_end(made, one)
    if "do_sample" not in options:
        given = [as_dict(part) for part, _, _ in parts]
        for made, (_, one, count) in zip(generator.generate(given, **options, logprobs=True), parts, strict=True):
            assert made.logprobs[:count] == made.weight_versions[:count] == [None] * count
            assert made.logprobs[count:] == pytest.approx(one.logprobs[count:], abs=1e-4)
            assert (made.token_ids, made.text, made.finish_reason) == (one.token_ids, one.text, one.finish_reason)
    if name in COUNT_FROM_THE_PROMPT:
        prompts = [part.prompt_token_ids + part.token_ids for part, _, count in parts if count]
        naive = generator.generate(prompts, **options, seed=5)
        rests = [one.token_ids[count:] for _, one, count in parts if count]
        assert [made.token_ids for made in naive] != rests


@pytest.mark.parametrize("name", table.names(table.NATIVE))
def test_the_cases_show_in_the_tokens(generator, name):
    """All but those whose job is to leave tokens as they are."""
    neutral = {"prompt_lookup_num_tokens", "max_time", "pad_token_id", "remove_invalid_values", "renormalize_logits"}
    without = {} if name == "do_sample" else {key: value for key, value in CASES[name].items() if key != name}
    room = {"max_new_tokens": 14}
    first = generator.generate(PROMPTS, **({} if name == "max_length" else room) | CASES[name], seed=5)
    second = generator.generate(PROMPTS, **room | without, seed=5)
    assert ([c.token_ids for c in first] == [c.token_ids for c in second]) == (name in neutral)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_an_aborted_request_goes_on_over_its_cached_blocks(overlap, steps):
    config = GenerationConfig(max_new_tokens=30, repetition_penalty=1.3, **SAMPLED)
    with PagedGenerator(tiny_model(), byte_tokenizer(), overlap=overlap) as generator:
        [whole] = generator.generate(PROMPTS[1:2], config, seed=8, logprobs=True, prompt_logprobs=True)
        engine = generator.engine
        engine.reset_prefix_cache()
        request_id = engine.add_request(PROMPTS[1], config, seed=8, logprobs=True)
        tokens, scores = [], []
        for _ in range(steps):
            for output in engine.step():
                tokens += output.new_token_ids
                scores += output.new_logprobs
        engine.abort(request_id)
        aborted = engine.step()[-1].completion
        assert aborted.finish_reason == "abort"
        assert aborted.token_ids[: len(tokens)] == tokens
        tokens, scores = list(aborted.token_ids), list(aborted.logprobs)
        engine.add_request(aborted, config, logprobs=True, seed=1)
        text = ""
        while engine.has_unfinished():
            for output in engine.step():
                tokens += output.new_token_ids
                scores += output.new_logprobs
                text += output.new_text
                made = output.completion
        assert_same_end(made, whole)
        assert tokens == whole.token_ids
        assert scores == made.logprobs
        assert whole.text.endswith(text)
        assert made.num_cached_tokens == (32 if steps else 0)
        assert_idle(generator.model)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_goes_on_may_be_preempted_and_interrupted(overlap):
    with PagedGenerator(tiny_model(), byte_tokenizer(), num_blocks=9, overlap=overlap) as generator:
        options = {"max_new_tokens": 40, **SAMPLED, "stop_strings": ["never"]}
        whole = generator.generate(PROMPTS, **options, seed=8, logprobs=True)
        parts = [interrupted(one, 17) for one in whole]
        made = {}
        for number, (index, output) in enumerate(generator.stream(parts, **options, logprobs=True)):
            if number == 10:
                generator.engine._core.dirty = True  # as an interrupt leaves it
            made.setdefault(index, []).extend(output.new_token_ids)
            if output.completion is not None:
                assert_same_end(output.completion, whole[index])
        assert [made[i] for i in range(3)] == [one.token_ids[17:] for one in whole]
        assert generator.engine.stats().num_preemptions > 0
        assert_idle(generator.model)


def test_samples_of_one_prompt_go_on_each_with_its_own_numbers(generator):
    whole = generator.generate(PROMPTS[:1], **SAMPLED, max_new_tokens=12, num_return_sequences=4, seed=6, logprobs=True)
    assert len({tuple(one.token_ids) for one in whole}) == 4
    chosen = [whole[3], whole[1]]
    made = generator.generate([interrupted(one, 5) for one in chosen], **SAMPLED, max_new_tokens=12, logprobs=True)
    for one, expected in zip(made, chosen, strict=True):
        assert_same_end(one, expected)


def test_a_dict_takes_the_seeds_of_the_call(generator):
    whole = generator.generate(PROMPTS, **SAMPLED, max_new_tokens=12, seed=6, logprobs=True)
    made = generator.generate([as_dict(interrupted(one, 5)) for one in whole], **SAMPLED, max_new_tokens=12, seed=6)
    assert [one.token_ids for one in made] == [one.token_ids for one in whole]
    branches = generator.generate(as_dict(interrupted(whole[0], 5)), **SAMPLED, max_new_tokens=12, seed=7,
                                  num_return_sequences=3)
    assert {tuple(one.token_ids[:5]) for one in branches} == {tuple(whole[0].token_ids[:5])}
    assert len({tuple(one.token_ids) for one in branches}) == 3


def test_text_and_ids_in_dicts_and_prompts_of_other_forms_beside_them(generator):
    tokenizer = generator.tokenizer
    text = tokenizer.decode(PROMPTS[0])
    ids = tokenizer(text)["input_ids"]
    [whole] = generator.generate([ids], max_new_tokens=8)
    output = whole.token_ids[:3]
    made = generator.generate([{"prompt": text, "output_token_ids": output}, ids, torch.tensor(ids).numpy(),
                               {"prompt_token_ids": ids, "output_token_ids": torch.tensor(output)}], max_new_tokens=8)
    assert [one.token_ids for one in made] == [whole.token_ids] * 4


def test_what_has_ended_ends_at_once_and_runs_nothing(generator):
    engine = generator.engine
    for options in ({"max_new_tokens": 6}, {"max_new_tokens": 20, "eos_token_id": EOS},
                    CASES["stop_strings"]):
        whole = generator.generate(PROMPTS, **options, seed=2, logprobs=True)
        before = engine.stats().num_steps
        for made, one in zip(generator.generate(whole, **options, logprobs=True), whole, strict=True):
            assert_same_end(made, one)
        assert engine.stats().num_steps == before
    longer = generator.generate(whole := generator.generate(PROMPTS, max_new_tokens=6), max_new_tokens=10)
    expected = generator.generate(PROMPTS, max_new_tokens=10)
    assert [one.token_ids for one in longer] == [one.token_ids for one in expected]
    assert all(len(one.token_ids) == 6 for one in whole)


def test_the_models_length_counts_output_of_before():
    with PagedGenerator(tiny_model(), max_model_len=40) as generator:
        [whole] = generator.generate(PROMPTS[1:2], max_new_tokens=100, logprobs=True)
        assert len(whole.token_ids) == 7
        for count in range(8):
            [made] = generator.generate(interrupted(whole, count), max_new_tokens=100, logprobs=True)
            assert_same_end(made, whole)
        with pytest.raises(ValueError, match="output_token_ids of 8 tokens after a prompt of 33"):
            generator.generate({"prompt_token_ids": PROMPTS[1], "output_token_ids": [1] * 8}, max_new_tokens=100)


@pytest.mark.parametrize(("output", "message"), [
    ([1, 256], "output_token_ids holds 256"),
    ([1, 2.5], "output_token_ids holds 2.5"),
    ([1, True], "output_token_ids holds True"),
    ("text", "output_token_ids='text'"),
    (5, "output_token_ids=5"),
    ([1] * 21, "output_token_ids of 21 tokens: expected at most 20"),
], ids=str)
def test_output_that_is_none(generator, output, message):
    prompt = {"prompt_token_ids": PROMPTS[0], "output_token_ids": output}
    with pytest.raises((TypeError, ValueError), match=message):
        generator.engine.add_request(prompt, GenerationConfig(max_new_tokens=20))
    with pytest.raises((TypeError, ValueError), match=r"prompts\[1\].*" + message):
        generator.generate([PROMPTS[0], prompt], max_new_tokens=20)
    first, second = generator.generate([PROMPTS[0], prompt], max_new_tokens=20, on_error="complete")
    assert (first.finish_reason, second.finish_reason) == ("length", "error")
    assert not generator.engine.has_unfinished()


def test_a_completion_cannot_be_several_samples(generator):
    [whole] = generator.generate(PROMPTS[:1], **SAMPLED, max_new_tokens=3)
    with pytest.raises(ValueError, match="expected 1 for a Completion"):
        generator.generate(whole, **SAMPLED, max_new_tokens=9, num_return_sequences=2)


def test_a_completion_that_never_was_a_request(generator):
    with pytest.raises(ValueError, match="expected at least one token id"):
        generator.generate(Completion([], None, "error", []), max_new_tokens=4)


def test_versions_of_before_stay():
    with PagedGenerator(tiny_model()) as generator:
        engine = generator.engine
        request_id = engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=10))
        for _ in range(4):
            engine.step()
        engine.abort(request_id)
        aborted = engine.step()[-1].completion
        with engine.weight_update():
            generator.model.lm_head.weight.data.neg_()
        [made] = generator.generate(aborted, max_new_tokens=10)
        assert made.weight_versions == [0] * 4 + [1] * 6
        assert made.token_ids[:4] == aborted.token_ids


def test_log_probabilities_of_other_tokens_are_not_known(generator):
    """A completion that was cut by hand may hold those of more tokens than it has."""
    [whole] = generator.generate(PROMPTS[:1], max_new_tokens=6, logprobs=True)
    [made] = generator.generate(replace(whole, token_ids=whole.token_ids[:2]), max_new_tokens=6, logprobs=True)
    assert made.token_ids == whole.token_ids
    assert made.logprobs[:2] == [None, None]
    assert made.logprobs[2:] == pytest.approx(whole.logprobs[2:], abs=1e-4)


def test_a_completion_that_was_kept_as_json(generator):
    """Its pairs come back as lists."""
    [whole] = generator.generate(PROMPTS[:1], max_new_tokens=6, logprobs=True)
    kept = Completion(**json.loads(json.dumps(asdict(replace(interrupted(whole, 2), version_runs=((0, 2),))))))
    [made] = generator.generate(kept, max_new_tokens=6, logprobs=True)
    assert (made.token_ids, made.weight_versions) == (whole.token_ids, [0] * 6)
    wrong = replace(kept, version_runs=[5])
    failed, other = generator.generate([wrong, PROMPTS[1]], max_new_tokens=2, on_error="complete")
    assert (failed.finish_reason, other.finish_reason) == ("error", "length")
