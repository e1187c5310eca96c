"""The likeliest tokens in each place, and their log-probabilities, are those of stock's scores."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from option_cases import CASES
from support import Interrupt, assert_idle, byte_generator, random_prompts, run_out, tiny_model
from test_interrupts import raising
from test_log_probs import PROMPTS, SAMPLED
from transformers import GenerationConfig

from hf_paged import Completion, PagedGenerator
from hf_paged.options import table

# Not options of the scores, or not of a single row.
NO_SCORES = ("max_length", "max_new_tokens", "pad_token_id", "num_return_sequences", "max_time", "stop_strings")


@pytest.fixture(scope="module")
def stock():
    return tiny_model()

generator = pytest.fixture(byte_generator, name="generator")


def scores_of(stock, prompt, tokens, **options):
    """Stock's processed scores and raw logits, log-softmaxed in float64, in the place of each token."""
    known, raw = [], []
    for i in range(len(tokens)):
        output = stock.generate(
            input_ids=torch.tensor([prompt + tokens[:i]]), attention_mask=torch.ones(1, len(prompt) + i),
            **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, output_logits=True,
        )
        known.append(output.scores[0][0].double().log_softmax(-1))
        raw.append(output.logits[0][0].double().log_softmax(-1))
    return known, raw


def assert_top(found: dict[int, float], expected: torch.Tensor, count: int, token: int):
    """`found` are ``count`` of the likeliest, best first, and the token; ties may be broken either way."""
    possible = int((expected > -math.inf).sum())
    others = [other for other in found if other != token]
    assert token in found
    assert min(count, possible) <= len(found) <= min(count, possible) + 1
    assert len(others) <= count
    values = list(found.values())
    best = values if len(found) <= count else values[:-1]
    assert best == sorted(best, reverse=True)
    torch.testing.assert_close(torch.tensor(best).double(), expected.topk(len(best)).values, rtol=1e-4, atol=1e-4)
    for other, value in found.items():
        assert value == pytest.approx(expected[other].item(), rel=1e-4, abs=1e-4)
        assert type(other) is int and type(value) is float


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 9, 128])
@pytest.mark.parametrize("kind", ["processed", "raw"])
def test_any_number_of_either_kind(stock, overlap, count, kind):
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        made = generator.generate(PROMPTS[:3], max_new_tokens=4, seed=3, logprobs=kind, top_logprobs=count, **options)
        if kind == "processed":
            generator.engine.reset_prefix_cache()  # else its prompts are computed in other shapes
            short = generator.generate(PROMPTS[:3], max_new_tokens=4, seed=3, logprobs=count, **options)
            assert [one.top_logprobs for one in short] == [one.top_logprobs for one in made]
    for one in made:
        known, raw = scores_of(stock, one.prompt_token_ids, one.token_ids, **options)
        assert one.logprobs_kind == kind
        for i, found in enumerate(one.top_logprobs):
            assert_top(found, (known if kind == "processed" else raw)[i], count, one.token_ids[i])
            assert found[one.token_ids[i]] == one.logprobs[i]


def test_every_native_option_of_the_scores(stock, generator):
    """Both kinds in one step of rows with all options: of each row its own."""
    names = [name for name in table.names(table.NATIVE) if name not in NO_SCORES]
    assert set(names) <= set(CASES)
    for name in names:
        options = dict(CASES[name])
        options.pop("max_new_tokens", None)
        if name in ("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "max_length",
                    "exponential_decay_length_penalty", "begin_suppress_tokens"):
            continue  # relative to the prompt: stock is asked for one token at a time here; a test of their own below
        prompts = PROMPTS[:2]
        [processed] = generator.generate(prompts[:1], max_new_tokens=3, seed=5, logprobs=4, **options)
        [raw] = generator.generate(prompts[1:], max_new_tokens=3, seed=5, logprobs="raw", top_logprobs=4, **options)
        for one, place in ((processed, 0), (raw, 1)):
            expected = scores_of(stock, one.prompt_token_ids, one.token_ids, **options)[place]
            for i, found in enumerate(one.top_logprobs):
                assert_top(found, expected[i], 4, one.token_ids[i])


@pytest.mark.parametrize("name", ["min_new_tokens", "forced_bos_token_id", "begin_suppress_tokens"])
def test_options_that_count_from_the_prompt(stock, generator, name):
    prompt = PROMPTS[4]  # of one token, behind which BOS is forced
    options = {key: value for key, value in CASES[name].items() if key != "max_new_tokens"}
    [made] = generator.generate([prompt], max_new_tokens=8, seed=1, logprobs=6, **options)
    [expected], _ = scores_of(stock, prompt, made.token_ids[:1], **{**options, "min_new_tokens": 1} if
                              "min_new_tokens" in options else options)
    assert_top(made.top_logprobs[0], expected, 6, made.token_ids[0])


def test_rows_that_ask_for_different_numbers_and_kinds_side_by_side(stock, generator):
    """Each gets what it gets alone; one that asks for nothing has nothing."""
    asked = [{"logprobs": 3}, {"logprobs": "raw", "top_logprobs": 40}, {"logprobs": False}, {"logprobs": True},
             {"logprobs": 100}]
    names = {"logprobs": [one["logprobs"] for one in asked], "top_logprobs": [one.get("top_logprobs") for one in asked]}
    options = {**SAMPLED, "top_k": 60, "seed": [1, 2, 3, 4, 5]}
    made = generator.generate(PROMPTS, **options, **names)
    for index, (one, own) in enumerate(zip(made, asked, strict=True)):
        [alone] = generator.generate([PROMPTS[index]], **{**options, "seed": [index + 1]}, **own)
        assert one.token_ids == alone.token_ids
        assert (one.top_logprobs is None) == (alone.top_logprobs is None) == (index in (2, 3))
        for found, expected in zip(one.top_logprobs or [], alone.top_logprobs or [], strict=True):
            assert found == pytest.approx(expected, abs=1e-4)


def test_prompts_have_theirs_too(stock):
    """In chunks, beside others, and of raw logits whatever the settings."""
    prompts = random_prompts([40, 3, 1, 17])
    with PagedGenerator(tiny_model(), max_num_batched_tokens=16, max_num_seqs=8) as generator:
        made = generator.generate(prompts, **SAMPLED, prompt_logprobs=[5, 40, 2, True])
    for prompt, one, count in zip(prompts, made, (5, 40, 2, None), strict=True):
        if count is None:
            assert one.prompt_top_logprobs is None
            continue
        logits = stock(input_ids=torch.tensor([prompt])).logits[0].detach().double().log_softmax(-1)
        assert one.prompt_top_logprobs[0] is None and len(one.prompt_top_logprobs) == len(prompt)
        for i, found in enumerate(one.prompt_top_logprobs[1:]):
            assert_top(found, logits[i], count, prompt[i + 1])
            assert found[prompt[i + 1]] == one.prompt_logprobs[i + 1]


def test_streams_hand_them_out_token_by_token(generator):
    whole = generator.generate(PROMPTS, **SAMPLED, logprobs=4)
    pieces: dict[int, list] = {}
    for index, output in generator.stream(PROMPTS, **SAMPLED, logprobs=4):
        assert len(output.new_top_logprobs) == len(output.new_token_ids)
        pieces.setdefault(index, []).extend(output.new_top_logprobs)
        if output.completion is not None:
            assert output.completion.top_logprobs == pieces[index]
    for index, one in enumerate(whole):
        for found, expected in zip(pieces[index], one.top_logprobs, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    assert all(output.new_top_logprobs is None for _, output in generator.stream(PROMPTS, **SAMPLED, logprobs=True))


def test_a_completion_goes_on_with_those_it_has(generator):
    """Also where it was kept as JSON, whose objects have texts for names."""
    [whole] = generator.generate(PROMPTS[:1], **SAMPLED, logprobs=3)
    [begun] = generator.generate(PROMPTS[:1], **{**SAMPLED, "max_new_tokens": 2}, logprobs=3)
    kept = Completion(**json.loads(json.dumps(asdict(begun))))
    for before in (begun, kept):
        [made] = generator.generate([before], **SAMPLED, logprobs=3)
        assert made.token_ids == whole.token_ids
        assert made.top_logprobs[:2] == begun.top_logprobs
        for found, expected in zip(made.top_logprobs, whole.top_logprobs, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    ids = {"prompt_token_ids": begun.prompt_token_ids, "output_token_ids": begun.token_ids}
    [unknown] = generator.generate([ids], max_new_tokens=4, logprobs=3)
    assert unknown.top_logprobs[:2] == [None, None] and None not in unknown.top_logprobs[2:]


def test_an_interrupted_request_has_one_entry_per_token():
    with PagedGenerator(tiny_model()) as generator:
        engine = generator.engine
        [whole] = generator.generate(PROMPTS[:1], max_new_tokens=6, logprobs=3)
        engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=6), logprobs=3)
        outputs = engine.step() + engine.step() + engine.step()
        with raising(engine._core.pool.runner, "launch", 1, True, Interrupt()), pytest.raises(Interrupt):
            engine.step()
        run_out(engine, outputs)
        completion = outputs[-1].completion
        assert completion.token_ids == whole.token_ids
        assert len(completion.top_logprobs) == 6
        for i, expected in enumerate(whole.top_logprobs):
            assert completion.token_ids[i] in completion.top_logprobs[i]
            assert completion.top_logprobs[i] == pytest.approx(expected, abs=1e-4)
        assert_idle(generator.model)
