"""Requests that guess at their tokens: they get the tokens of those that do not, in fewer steps where text repeats."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    Interrupt,
    assert_idle,
    byte_tokenizer,
    interrupted_behind,
    random_prompts,
    run_out,
    stock_copy,
    stock_generate,
    tiny_model,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine.features import drafts as speculation
from hf_paged.engine.features.drafts import Drafter, Rollouts, Speculation
from hf_paged.engine.features.stop_rules import StopRule
from hf_paged.engine.features.token_index import TokenIndex
from hf_paged.scheduler import Status

LOOKUP = {"prompt_lookup_num_tokens": 7}
REPEATED = [prompt * 4 for prompt in random_prompts([5, 9, 14, 7])]
ASCII = [[token % 94 for token in prompt] for prompt in REPEATED]  # whose output is text of one character a token


def drafter_behind(*texts, known=(1, 2, 3), most=7):
    index = TokenIndex()
    for text in texts:
        index.add(text)
    return Drafter(index, list(known), 0, most)


def fed(drafter, tokens):
    drafter.push(list(tokens))
    return drafter


@pytest.fixture
def guessing(monkeypatch):
    """Every sequence takes guesses in every step: what a function of it says, whatever that brings."""

    def install(guesses):
        def drafts(self, num_running, costs):
            running = [r.sequence for r in self._running.values() if r.sequence.status is Status.RUNNING]
            return {sequence.slot: guesses(sequence) for sequence in running if sequence.num_output_tokens}

        monkeypatch.setattr(Speculation, "drafts", drafts)

    return install


def truth_with_errors(outputs, wrong, seed=0):
    """Guesses of the tokens that will come, each of which may be another token."""
    rng = random.Random(seed)

    def guesses(sequence):
        output = outputs[tuple(sequence.prompt_token_ids)][sequence.num_output_tokens :][: rng.randint(0, 7)]
        return [rng.randrange(256) if rng.random() < wrong else token for token in output]

    return guesses


# -- what is guessed -------------------------------------------------------------------------------------------------


def test_what_stood_before_is_guessed():
    drafter = drafter_behind([1, 2, 3, 4, 5, 6, 7])
    assert drafter.guesses(7, 0.01) == [4, 5, 6, 7]
    assert drafter.guesses(2, 0.01) == [4, 5]
    assert fed(drafter, [4]).guesses(7, 0.01) == [5, 6, 7]


def test_a_replaced_token_in_a_copied_text_does_not_end_the_guesses():
    text = list(range(10, 40))
    drafter = fed(drafter_behind(text, known=text[:3]), [*text[3:12], 99])
    assert drafter.guesses(3, 0.01) == text[13:16]
    assert fed(drafter, [98]).guesses(3, 0.01) == []  # two in a row are another text


def test_a_token_that_differs_in_a_short_match_ends_it():
    drafter = fed(drafter_behind(list(range(1, 30))), [99])
    assert drafter.guesses(3, 0.01) == []


def test_guesses_that_come_to_nothing_end_and_begin_again_where_text_repeats():
    """Three short runs of wrong guesses; then a text is followed, guessed or not, and that is seen."""
    drafter, rng = drafter_behind([1, 2, 3, 4] * 2, [*range(50, 90)]), random.Random(0)
    for _ in range(3):
        assert drafter.guesses(7, 0.01)
        fed(drafter, [rng.randrange(100, 200), 1, 2, 3])
    assert drafter.guesses(7, 0.01) == []
    assert drafter.gain < 0.5
    fed(drafter, range(50, 60))
    assert drafter.guesses(7, 0.01) == [*range(60, 67)]


def test_the_less_likely_a_guess_is_the_fewer_are_made():
    drafter = drafter_behind([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert drafter.chance == 0.5
    assert [len(drafter.guesses(7, least)) for least in (0.6, 0.5, 0.3, 0.2, 0.1)] == [0, 1, 1, 2, 3]


def test_a_run_is_as_long_as_the_guesses_that_were_asked_for():
    drafter = fed(drafter_behind([1, 2, 3] * 9, most=2), [1, 2, 3, 1])
    assert drafter.gain == pytest.approx(1 + (2 - 1) / 4 + (2 - 1.25) / 4)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(text=st.lists(st.integers(0, 3), max_size=30), tokens=st.lists(st.integers(0, 3), max_size=40),
       cuts=st.sets(st.integers(0, 40)), most=st.integers(1, 7))
def test_what_is_guessed_does_not_depend_on_how_many_tokens_came_at_once(text, tokens, cuts, most):
    together, apart = (drafter_behind(text, known=text[:3], most=most) for _ in range(2))
    together.push(tokens)
    ends = sorted(cuts | {len(tokens)})
    for first, last in zip([0, *ends], ends, strict=False):
        apart.push(tokens[first:last])
    assert (apart.gain, apart.num_seen, apart._is_on) == (together.gain, together.num_seen, together._is_on)
    assert apart.guesses(7, 0.01) == together.guesses(7, 0.01)
    assert apart._index.texts == together._index.texts


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_requests_of_one_prompt_and_salt_have_one_index():
    rollouts = Rollouts()
    index = rollouts.index_of([1, 2], b"")
    assert rollouts.index_of([1, 2], b"") is index
    assert rollouts.index_of([1, 2], b"tenant") is not index
    assert rollouts.index_of([1, 3], b"") is not index
    rollouts.forget()
    assert rollouts.index_of([1, 2], b"") is not index


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(speculation, "MOST_REMEMBERED", 100)
    monkeypatch.setattr(speculation, "MOST_OF_PROMPT", 60)
    monkeypatch.setattr(speculation, "MOST_PROMPTS", 5)
    rollouts = Rollouts()
    for number in range(30):
        index = rollouts.index_of([number % 7, 1, 2, 3], b"")
        index.add([number] * 12)
        assert rollouts.num_tokens <= 100 + 12
        assert index.num_tokens <= 60 + 12
        assert len(rollouts._indexes) <= 5
    for number in range(10):
        index = rollouts.index_of([1, 2], b"")
        index.add([number] * 12)
    # Older texts of a prompt go, the prompt stays.
    assert index.texts[0] == [1, 2]
    assert index.texts[-1] == [9] * 12
    assert index.texts[1][0] > 0


def test_a_long_prompt_is_read_once(monkeypatch):
    """It alone is more than is kept of a prompt, and stays as it is."""
    monkeypatch.setattr(speculation, "MOST_OF_PROMPT", 20)
    rollouts, prompt = Rollouts(), list(range(30))
    index = rollouts.index_of(prompt, b"")
    index.add([1] * 8)
    assert rollouts.index_of(prompt, b"") is index
    index.add([2] * 8)
    assert rollouts.index_of(prompt, b"").texts == [prompt, [2] * 8]


# -- the same tokens -------------------------------------------------------------------------------------------------


SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 3},
    "filtered": {"do_sample": True, "top_k": 20, "top_p": 0.9, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "n-grams": {"no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6], [7]]},
    "typical": {"do_sample": True, "typical_p": 0.8, "seed": 5, "renormalize_logits": True},
    "minimum": {"min_new_tokens": 20, "eos_token_id": list(range(0, 256, 3))},
    "eos": {"do_sample": True, "seed": 6, "eos_token_id": list(range(0, 256, 9))},
    "forced": {"forced_eos_token_id": 9, "exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 9},
}


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_guesses_right_and_wrong_change_no_token(guessing, name, overlap):
    """Whatever is guessed, and whichever settings look at the tokens before."""
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        expected = generator.generate(REPEATED, max_new_tokens=30, logprobs=3, **SETTINGS[name])
        outputs = {tuple(one.prompt_token_ids): one.token_ids for one in expected}
        guessing(truth_with_errors(outputs, wrong=0.2))
        before = generator.engine.stats()
        made = generator.generate(REPEATED, max_new_tokens=30, logprobs=3, **SETTINGS[name], **LOOKUP)
        after = generator.engine.stats()
        assert [one.token_ids for one in made] == [one.token_ids for one in expected]
        assert [one.finish_reason for one in made] == [one.finish_reason for one in expected]
        for one, other in zip(made, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            for top, other_top in zip(one.top_logprobs, other.top_logprobs, strict=True):
                assert top == pytest.approx(other_top, abs=1e-4)
        num_right = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        assert 0 < num_right < after.num_draft_tokens - before.num_draft_tokens
        assert after.num_generated_tokens - before.num_generated_tokens == sum(len(one.token_ids) for one in made)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=25)
@given(seed=st.integers(0, 9), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
       num_blocks=st.sampled_from([8, 12, 60]), max_num_seqs=st.sampled_from([1, 2, 8]),
       budget=st.sampled_from([16, 64]), wrong=st.sampled_from([0.0, 0.3, 1.0]), overlap=st.booleans(),
       max_new_tokens=st.integers(1, 40))
def test_greedy_tokens_are_stocks_in_any_pool(seed, lengths, num_blocks, max_num_seqs, budget, wrong, overlap,
                                              max_new_tokens):
    """Tiny pools, with preemptions; few slots; steps that are full."""
    model, prompts = tiny_model(seed % 3), random_prompts(lengths, seed)
    outputs = {
        tuple(prompt): stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=max_new_tokens)[
            0, len(prompt) :].tolist()
        for prompt in prompts
    }
    with pytest.MonkeyPatch.context() as patch:
        guesses = truth_with_errors(outputs, wrong, seed)

        def drafts(self, num_running, costs):
            running = [r.sequence for r in self._running.values() if r.sequence.status is Status.RUNNING]
            return {sequence.slot: guesses(sequence) for sequence in running if sequence.num_output_tokens}

        patch.setattr(Speculation, "drafts", drafts)
        with PagedGenerator(model, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                            overlap=overlap) as generator:
            made = generator.generate(prompts, max_new_tokens=max_new_tokens, **LOOKUP)
            assert [one.token_ids for one in made] == [outputs[tuple(prompt)] for prompt in prompts]
            stats = generator.engine.stats()
            assert stats.num_free_blocks == stats.num_blocks - 1


@pytest.mark.slow
def test_sampled_tokens_have_the_distribution_of_the_model(guessing):
    """Chi-square of the first three tokens of 4,000 requests, one of whose guesses is likely and one is not."""
    model, prompt, count = tiny_model(vocab_size=12, initializer_range=0.5), [3, 1, 4, 1, 5], 4000
    stock = stock_copy(model)

    def probabilities(tokens):
        with torch.no_grad():
            return (stock(torch.tensor([tokens])).logits[0, -1] / 1.3).softmax(-1).double().numpy()

    expected = {}
    for a, p in enumerate(probabilities(prompt)):
        for b, q in enumerate(probabilities([*prompt, a])):
            for c, r in enumerate(probabilities([*prompt, a, b])):
                expected[a, b, c] = p * q * r
    guessing(lambda sequence: [int(probabilities(sequence.token_ids).argmax()), 7])
    with PagedGenerator(model, max_num_seqs=200, max_num_batched_tokens=2000) as generator:
        seeds = np.random.default_rng(0).integers(0, 2**62, count).tolist()
        made = generator.generate([prompt] * count, seed=seeds, max_new_tokens=3, do_sample=True, temperature=1.3,
                                  top_k=0, **LOOKUP)
        assert generator.engine.stats().num_accepted_draft_tokens > count / 10
    seen = Counter(tuple(one.token_ids) for one in made)
    often = [key for key, chance in expected.items() if chance * count >= 5]
    rest = 1 - sum(expected[key] for key in often)
    cells = [(seen[key], expected[key] * count) for key in often]
    cells.append((count - sum(seen[key] for key in often), rest * count))
    chi_square = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, (chi_square, freedom)


def test_streamed_tokens_come_once_and_in_order(guessing):
    with PagedGenerator(tiny_model(), tokenizer=byte_tokenizer()) as generator:
        prompts = REPEATED
        expected = generator.generate(prompts, max_new_tokens=24)
        guessing(truth_with_errors({tuple(one.prompt_token_ids): one.token_ids for one in expected}, 0.2))
        tokens, texts, scores = ([[] for _ in prompts] for _ in range(3))
        completions = [None] * len(prompts)
        for index, output in generator.stream(prompts, max_new_tokens=24, logprobs=True, **LOOKUP):
            tokens[index] += output.new_token_ids
            texts[index].append(output.new_text)
            scores[index] += output.new_logprobs
            completions[index] = output.completion
        for index, completion in enumerate(completions):
            assert tokens[index] == completion.token_ids == expected[index].token_ids
            assert "".join(texts[index]) == completion.text
            assert scores[index] == completion.logprobs


def test_tokens_that_were_streamed_before_an_interrupt_are_not_streamed_again(guessing):
    """The engine makes everything anew, several tokens a step."""
    model = hf_paged.enable(tiny_model(), overlap=False)
    engine, prompt = hf_paged.get_engine(model), REPEATED[1]
    output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=30)[0, len(prompt) :].tolist()
    guessing(lambda sequence: output[sequence.num_output_tokens :][:4])
    engine.add_request(prompt, GenerationConfig(max_new_tokens=30, **LOOKUP))
    streamed = []
    for number in range(60):
        if number in (2, 3, 5):
            engine._core.dirty = True  # as an exception from outside leaves it
        for one in engine.step():
            streamed += one.new_token_ids
        if not engine.has_unfinished():
            break
    assert streamed == output
    assert_idle(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_invalid_logits_behind_a_wrong_guess_are_nobodys_error(guessing, overlap):
    """The guess is a token that the model cannot read; what was computed behind it does not count."""
    model, prompt = tiny_model(), REPEATED[1]
    output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=20)[0, len(prompt) :].tolist()
    unread = next(token for token in range(1, 256) if token not in {*prompt, *output})
    with torch.no_grad():
        model.model.embed_tokens.weight[unread] = float("nan")
    guessing(lambda sequence: [*output[sequence.num_output_tokens :][:1], unread, 3])
    with PagedGenerator(model, overlap=overlap) as generator:
        [one] = generator.generate([prompt], max_new_tokens=20, **LOOKUP)
        assert (one.finish_reason, one.error, one.token_ids) == ("length", None, output)
        assert generator.engine.stats().num_accepted_draft_tokens > 0


def one_of_each(generator, prompts, **options):
    """What calls with and without guesses have to agree on."""
    made = generator.generate(prompts, max_new_tokens=40, logprobs=2, **options)
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.error, len(one.logprobs),
             [sorted(top) for top in one.top_logprobs]) for one in made]


@pytest.mark.parametrize(("overlap", "keeps_stop"), [(False, True), (True, False)])
def test_a_stop_string_among_accepted_guesses_ends_the_request_there(guessing, overlap, keeps_stop):
    """Whatever token of a step completes it, the tokens behind it count for nothing; other rows go on."""
    with PagedGenerator(tiny_model(vocab_size=94), tokenizer=byte_tokenizer(), overlap=overlap) as generator:
        plain = generator.generate(ASCII, max_new_tokens=40)
        outputs = {tuple(one.prompt_token_ids): one.token_ids for one in plain}
        ends = set()
        for cut in range(1 + 2 * overlap, 24, 4):
            configs = [GenerationConfig(stop_strings=one.text[cut : cut + 2], **LOOKUP) for one in plain[:3]]
            options = {"generation_config": [*configs, GenerationConfig()], "include_stop_str_in_output": keeps_stop}
            guessing(lambda sequence: [])
            expected = one_of_each(generator, ASCII, **options)
            guessing(lambda sequence: outputs[tuple(sequence.prompt_token_ids)][sequence.num_output_tokens :][:7])
            assert one_of_each(generator, ASCII, **options) == expected, cut
            ends |= {len(one[0]) for one in expected if one[2] == "stop"}
        assert len(ends) > 4
        stats = generator.engine.stats()
        assert stats.num_accepted_draft_tokens > 0 and stats.num_free_blocks == stats.num_blocks - 1


def test_a_stop_string_beside_eos_and_beside_the_length(guessing):
    """Whichever comes first in a step of several tokens is the end."""
    with PagedGenerator(tiny_model(vocab_size=94), tokenizer=byte_tokenizer(), overlap=False) as generator:
        [plain] = generator.generate([ASCII[1]], max_new_tokens=40)
        reasons = set()
        guesses = [lambda sequence: [], lambda sequence: plain.token_ids[sequence.num_output_tokens :][:7]]
        for stop, eos, length in [(9, 11, 40), (11, 9, 40), (12, 30, 11), (9, 30, 12), (10, 10, 40)]:
            options = {"stop_strings": plain.text[stop : stop + 1], "eos_token_id": plain.token_ids[eos]}
            results = []
            for guess in guesses:
                guessing(guess)
                [one] = generator.generate([ASCII[1]], max_new_tokens=length, **options, **LOOKUP)
                results.append((one.token_ids, one.text, one.finish_reason, one.stop_reason))
            assert results[0] == results[1]
            reasons.add(results[0][2])
        assert reasons == {"eos", "length", "stop"}


def test_a_rule_that_raises_among_guesses_ends_its_request_alone(guessing, monkeypatch):
    with PagedGenerator(tiny_model(), tokenizer=byte_tokenizer(), overlap=False) as generator:
        plain = generator.generate(REPEATED, max_new_tokens=30)
        outputs = {tuple(one.prompt_token_ids): one.token_ids for one in plain}
        guessing(lambda sequence: outputs[tuple(sequence.prompt_token_ids)][sequence.num_output_tokens :][:7])
        push, failing = StopRule.push, outputs[tuple(REPEATED[0])][:9]

        def raises(rule, token):
            result = push(rule, token)
            if list(rule.tail)[-9:] == failing:
                raise RuntimeError("of a test")
            return result

        monkeypatch.setattr(StopRule, "push", raises)
        made = generator.generate(REPEATED, max_new_tokens=30, stop_strings="never to be found", **LOOKUP)
        assert "of a test" in made[0].error and made[0].finish_reason == "error"
        assert [one.token_ids for one in made[1:]] == [one.token_ids for one in plain[1:]]


def test_the_time_of_a_call_ends_guesses(guessing, monkeypatch):
    """At the first token that comes too late, as without guesses."""
    with PagedGenerator(tiny_model(), overlap=False) as generator:
        [plain] = generator.generate([REPEATED[1]], max_new_tokens=30)
        guessing(lambda sequence: plain.token_ids[sequence.num_output_tokens :][:7])
        [made] = generator.generate([REPEATED[1]], max_new_tokens=30, max_time=1e-9, **LOOKUP)
        assert (made.token_ids, made.finish_reason) == (plain.token_ids[:1], "length")
        is_late = iter([False] * 3 + [True] * 99)
        monkeypatch.setattr(StopRule, "is_late", lambda rule, now: next(is_late))
        [made] = generator.generate([REPEATED[1]], max_new_tokens=30, max_time=100.0, **LOOKUP)
        assert (made.token_ids, made.finish_reason) == (plain.token_ids[:4], "length")


def test_an_aborted_request_gives_everything_back(guessing):
    model = hf_paged.enable(tiny_model(), overlap=True)
    engine = hf_paged.get_engine(model)
    guessing(lambda sequence: [1, 2, 3])
    ids = [engine.add_request(prompt, GenerationConfig(max_new_tokens=40, **LOOKUP)) for prompt in REPEATED]
    for _ in range(4):
        engine.step()
    for request_id in ids[:3]:
        engine.abort(request_id)
    run_out(engine)
    assert_idle(model)
    assert not engine._core.features[Speculation]._running


# -- fewer steps -----------------------------------------------------------------------------------------------------


def steps_of(generator, prompts, **kwargs):
    before = generator.engine.stats()
    made = generator.generate(prompts, **kwargs)
    after = generator.engine.stats()
    return after.num_steps - before.num_steps, [one.token_ids for one in made]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_an_earlier_request_made_of_a_prompt_is_guessed(overlap):
    prompt = random_prompts([30])[0]
    with PagedGenerator(tiny_model(initializer_range=0.5), overlap=overlap) as generator:
        first, tokens = steps_of(generator, [prompt], max_new_tokens=40, cache_salt="a", **LOOKUP)
        again, same = steps_of(generator, [prompt], max_new_tokens=40, cache_salt="a", **LOOKUP)
        assert tokens == same
        assert again <= 14 < first
        # Not to another tenant, and not after a reset.
        assert steps_of(generator, [prompt], max_new_tokens=40, cache_salt="b", **LOOKUP)[0] >= first - 1
        generator.engine.reset_prefix_cache()
        assert steps_of(generator, [prompt], max_new_tokens=40, cache_salt="a", **LOOKUP)[0] >= first - 1


def test_requests_that_wait_cost_no_step_anything():
    """However many wait, a step looks at those that ran."""
    model = hf_paged.enable(tiny_model(), max_num_seqs=2)
    engine = hf_paged.get_engine(model)
    for prompt in REPEATED * 3:
        engine.add_request(prompt, GenerationConfig(max_new_tokens=6, **LOOKUP))
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, len(engine._core.features[Speculation]._running))
    assert most == 2


def test_the_switch_and_a_call_without_the_option_guess_nothing():
    model = tiny_model()
    with PagedGenerator(model, speculation=False) as generator:
        generator.generate(REPEATED, max_new_tokens=30, **LOOKUP)
        assert generator.engine.stats().num_draft_tokens == 0
    with PagedGenerator(model) as generator:
        generator.generate(REPEATED, max_new_tokens=30)
        assert generator.engine.stats().num_draft_tokens == 0
        assert not generator.engine._core.features[Speculation]._rollouts.num_tokens


def test_requests_under_a_grammar_guess_nothing():
    options = {"structured": {"regex": "[ab]{30}"}}
    with PagedGenerator(tiny_model(), tokenizer=byte_tokenizer()) as generator:
        expected = generator.generate(REPEATED, max_new_tokens=30, **options)
        made = generator.generate(REPEATED, max_new_tokens=30, **options, **LOOKUP)
        assert [one.token_ids for one in made] == [one.token_ids for one in expected]
        assert generator.engine.stats().num_draft_tokens == 0


def test_requests_under_a_grammar_run_beside_those_that_guess(guessing):
    with PagedGenerator(tiny_model(), tokenizer=byte_tokenizer(), overlap=True) as generator:
        forms = [{"regex": "[a-c]{20}"}, None, {"regex": "[0-9]{20}"}, None]
        expected = generator.generate(REPEATED, max_new_tokens=20, structured=forms)
        guessing(truth_with_errors({tuple(one.prompt_token_ids): one.token_ids for one in expected}, 0.2))
        made = generator.generate(REPEATED, max_new_tokens=20, structured=forms, **LOOKUP)
        assert [one.token_ids for one in made] == [one.token_ids for one in expected]
        assert generator.engine.stats().num_accepted_draft_tokens > 0


def request_like(slot, text):
    """As much of a request as `Speculation` looks at, behind a text whose end stood before."""
    class Sequence:
        status, request_id, cache_salt = Status.RUNNING, str(slot), b""
        prompt_token_ids, output_token_ids = text, [1]
        num_output_tokens = 1

        def output_from(self, first):
            return self.output_token_ids[first:]

    sequence = Sequence()
    sequence.slot = slot

    class Request:
        request_id, draft_tokens = str(slot), 7

    request = Request()
    request.sequence = sequence
    return request


def test_a_request_that_started_over_guesses_when_it_is_back_where_it_was():
    made, request = Speculation(), request_like(0, [1, 2, 3, 4] * 5)
    made.started(request)
    sequence = request.sequence

    def found_behind(*output):
        sequence.output_token_ids, sequence.num_output_tokens = list(output), len(output)
        return made.drafts(1, "cpu")

    assert found_behind() == {}  # its prompt is computed
    assert found_behind(1, 2, 3) == {0: [4]}
    assert found_behind(1) == {}
    assert found_behind(1, 2, 3) == {0: [4]}


@pytest.mark.parametrize(("num_guessing", "num_running", "guesses"), [
    (1, 1, True), (1, 2, True), (1, 32, False), (32, 32, True), (24, 32, True), (8, 32, False), (1, 65, False),
    (65, 65, False),
])
def test_guesses_are_made_where_they_bring_more_than_they_cost(num_guessing, num_running, guesses):
    """A step with guesses is slower for everybody in it."""
    made = Speculation()
    for slot in range(num_guessing):
        request = request_like(slot, [slot, 1, 2, 3, 4, 5, 6, 7, 8, 9, slot])
        request.sequence.output_token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        request.sequence.num_output_tokens = 9
        made.started(request)
        made._drafters[str(slot)] = drafter = Drafter(TokenIndex(), [], 9, 7)
        drafter._text = drafter._index.add([1, 2, 3] * 5)
        drafter._match, drafter.gain = drafter._index.look_up(drafter._text), 6.0
    found = made.drafts(num_running, "cuda")
    assert bool(found) == guesses
    assert sum(1 + len(tokens) for tokens in found.values()) <= 128


@pytest.mark.parametrize("times", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_an_interrupt_among_the_indexes_harms_no_later_guess(times):
    """An index that the interrupt left half-way is not looked at again: neither by its request nor by later ones.

    Behind the first `times` calls of each line.
    """
    prompt, config = [70, 71, 72, 73] * 3, GenerationConfig(max_new_tokens=8, prompt_lookup_num_tokens=4)
    model = tiny_model(vocab_size=256)

    def finish(engine, request_id):
        while engine.has_unfinished():
            for output in engine.step():
                if output.completion is not None and output.request_id == request_id:
                    return output.completion.token_ids, output.completion.error
        return None

    def run(at):
        engine = hf_paged.Engine(model, hf_paged.PagedConfig(num_blocks=40))
        engine.add_request(prompt, config, request_id="a")
        with suppress(Interrupt), interrupted_behind(at, "/token_index.py", "/features/drafts.py") as places:
            run_out(engine)
        return engine, places

    plain = hf_paged.Engine(model, hf_paged.PagedConfig(num_blocks=40))
    plain.add_request(prompt, config, request_id="a")
    expected = finish(plain, "a")
    assert expected[1] is None
    _, all_places = run(None)
    assert 50 < len(all_places) < 400
    for at, place in enumerate(all_places, 1):
        if all_places[:at].count(place) > times:
            continue
        engine, places = run(at)
        assert places == all_places[:at]
        for name in ("a", "b"):
            if name == "b":
                engine.add_request(prompt, config, request_id=name)
            found = finish(engine, name)
            assert found in (expected, None) if name == "a" else found == expected, places[-1]
