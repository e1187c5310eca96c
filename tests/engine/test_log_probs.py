"""Log-probabilities of generated tokens and of prompts are stock's, whatever happens to the request on its way."""

from __future__ import annotations

import pytest
import torch
from option_cases import CASES
from support import Interrupt, assert_idle, byte_tokenizer, left_padded, random_prompts, run_out, tiny_model
from test_interrupts import raising
from transformers import GenerationConfig

from hf_paged import PagedGenerator
from hf_paged.options import table
from hf_paged.runner import prompt_scores
from hf_paged.runner.model_runner import ModelRunner

PROMPTS = random_prompts([20, 5, 33, 16, 1])
SAMPLED = {"do_sample": True, "seed": 3, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def stock():
    return tiny_model()


@pytest.fixture
def generator():
    with PagedGenerator(tiny_model()) as generator:
        yield generator
        assert_idle(generator.model)


@torch.no_grad()
def prompt_scores_of(stock, prompt):
    """What a plain forward says of a prompt."""
    known = stock(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [None] + [known[i, token].item() for i, token in enumerate(prompt[1:])]


def drawn_scores_of(stock, prompt, tokens, **options):
    """log_softmax of stock's processed scores at each of `tokens`: one stock call per token."""
    known, least = [], options.pop("min_new_tokens", 0)
    for i, token in enumerate(tokens):
        output = stock.generate(
            input_ids=torch.tensor([prompt + tokens[:i]]), attention_mask=torch.ones(1, len(prompt) + i), **options,
            max_new_tokens=1,
            min_new_tokens=1 if i < least else None, return_dict_in_generate=True, output_scores=True,
        )
        known.append(output.scores[0][0].float().log_softmax(-1)[token].item())
    return known


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    assert all(type(value) is float for value in actual)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def assert_scored(stock, completion, **options):
    assert completion.token_ids
    expected = drawn_scores_of(stock, completion.prompt_token_ids, completion.token_ids, **options)
    assert_close(completion.logprobs, expected)


def assert_prompt_scored(stock, completion):
    assert completion.prompt_logprobs[0] is None
    assert_close(completion.prompt_logprobs[1:], prompt_scores_of(stock, completion.prompt_token_ids)[1:])


# -- generated tokens ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_log_probs_are_stocks_transition_scores(stock, overlap):
    inputs = left_padded(PROMPTS)
    free = stock.generate(**inputs, max_new_tokens=10, return_dict_in_generate=True, output_scores=True)
    expected = stock.compute_transition_scores(free.sequences, free.scores, normalize_logits=True)
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=10, logprobs=True)
    width = inputs["input_ids"].shape[1]
    for completion, tokens, scores in zip(completions, free.sequences[:, width:].tolist(), expected, strict=True):
        assert completion.token_ids == tokens
        assert_close(completion.logprobs, scores.tolist())
        assert completion.prompt_logprobs is None


@pytest.mark.parametrize("overlap", [False, True])
def test_an_eos_has_its_log_prob_and_the_token_made_after_it_has_none(stock, overlap):
    eos = stock.generate(input_ids=torch.tensor([PROMPTS[0]]), max_new_tokens=5)[0, -1].item()
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=10, eos_token_id=eos, logprobs=True)
    assert completions[0].finish_reason == "eos"
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs)
    assert_scored(stock, completions[0], eos_token_id=eos)


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.7}, {"temperature": 1.7, "top_k": 5}, {"top_p": 0.6, "top_k": 0}, {"min_p": 0.1, "top_k": 0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
], ids=str)
def test_sampled_log_probs_are_those_of_the_distribution_drawn_from(stock, generator, options):
    options = {"top_k": 0} | options
    for completion in generator.generate(PROMPTS, **SAMPLED, **options, logprobs=True):
        assert_scored(stock, completion, do_sample=True, **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0, "temperature": 1.3}], ids=["greedy", "drawn"])
def test_barred_eos_has_no_share(stock, generator, options):
    """EOS is the likeliest token at each of the first steps, so that leaving it in would show."""
    prompt = PROMPTS[2]
    eos = stock.generate(input_ids=torch.tensor([prompt]), max_new_tokens=1)[0, -1].item()
    options = {**options, "eos_token_id": [eos, 7, 9], "min_new_tokens": 4}
    [completion] = generator.generate([prompt], **options, max_new_tokens=6, seed=1, logprobs=True)
    assert eos not in completion.token_ids[:4]
    assert_scored(stock, completion, **options)
    free = {k: v for k, v in options.items() if k != "min_new_tokens"}
    unbarred = drawn_scores_of(stock, prompt, completion.token_ids[:1], **free)[0]
    assert completion.logprobs[0] > unbarred + 0.01


def stocks_steps(stock, prompt, tokens, options):
    """log_softmax of stock's `output_logits` and `output_scores` at each of `tokens`, which stock is made to draw."""
    draws = iter(tokens)

    def draw(probs, num_samples):
        return torch.tensor([[next(draws)]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", draw)
        output = stock.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options,
                                return_dict_in_generate=True, output_logits=True, output_scores=True)
    assert output.sequences[0, len(prompt) :].tolist() == tokens
    return {kind: [step[0].float().log_softmax(-1)[token].item() for step, token in zip(steps, tokens, strict=True)]
            for kind, steps in (("raw", output.logits), ("processed", output.scores))}


@pytest.fixture(scope="module")
def with_text():
    with PagedGenerator(tiny_model(), byte_tokenizer()) as generator:
        yield generator


@pytest.mark.slow
@pytest.mark.parametrize("name", table.names(table.NATIVE))
def test_both_kinds_are_stocks_logits_and_scores_under_every_native_option(stock, with_text, name):
    options = ({} if name == "max_length" else {"max_new_tokens": 14}) | CASES[name]
    prompts = [PROMPTS[0], [7]]
    made = {kind: with_text.generate(prompts, **options, seed=2, logprobs=kind) for kind in ("raw", "processed", True)}
    assert [c.logprobs for c in made[True]] == [c.logprobs for c in made["processed"]]
    of_stock = {key: value for key, value in options.items() if key != "num_return_sequences"}
    if name == "stop_strings":
        of_stock["tokenizer"] = with_text.tokenizer
    for raw, processed in zip(made["raw"], made["processed"], strict=True):
        assert raw.token_ids == processed.token_ids
        expected = stocks_steps(stock, raw.prompt_token_ids, raw.token_ids, of_stock)
        assert_close(raw.logprobs, expected["raw"])
        assert_close(processed.logprobs, expected["processed"])
        assert (raw.logprobs_kind, processed.logprobs_kind) == ("raw", "processed")


@pytest.mark.parametrize("overlap", [False, True])
def test_kinds_meet_in_one_step(overlap):
    config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.5)
    kinds = ["raw", False, "processed", True, "raw"]
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        engine = generator.engine
        alone = [generator.generate([p], config, seed=[4], logprobs=kind)[0]
                 for p, kind in zip(PROMPTS, kinds, strict=True)]
        ids = [engine.add_request(p, config, seed=4, logprobs=kind) for p, kind in zip(PROMPTS, kinds, strict=True)]
        outputs = []
        run_out(engine, outputs)
        completions = {output.request_id: output.completion for output in outputs if output.completion}
        for request_id, expected in zip(ids, alone, strict=True):
            completion = completions[request_id]
            assert completion.token_ids == expected.token_ids
            if expected.logprobs is None:
                assert completion.logprobs is completion.logprobs_kind is None
            else:
                assert_close(completion.logprobs, expected.logprobs)
        assert alone[0].logprobs != alone[3].logprobs
        with pytest.raises(ValueError, match="logprobs='processed': expected 'raw', as the completion has them"):
            engine.add_request(alone[0], GenerationConfig(max_new_tokens=20), logprobs=True)
        assert not engine.has_unfinished()


def test_samples_of_one_prompt_have_their_own(stock, generator):
    completions = generator.generate(
        PROMPTS[:2], **SAMPLED, top_k=0, num_return_sequences=3, logprobs=True, prompt_logprobs=True
    )
    assert len({tuple(c.token_ids) for c in completions}) == 6
    for completion in completions:
        assert_scored(stock, completion, do_sample=True, top_k=0)
        assert_prompt_scored(stock, completion)


def test_only_those_who_ask_get_them(stock, generator):
    engine, config = generator.engine, GenerationConfig(max_new_tokens=8)
    asked = [{}, {"logprobs": True}, {"prompt_logprobs": True}, {"logprobs": True, "prompt_logprobs": True}, {}]
    ids = [engine.add_request(p, config, **flags) for p, flags in zip(PROMPTS, asked, strict=True)]
    completions = {}
    while engine.has_unfinished():
        for output in engine.step():
            flags = asked[ids.index(output.request_id)]
            assert (output.new_logprobs is not None) == ("logprobs" in flags)
            completions[output.request_id] = output.completion
    for request_id, flags in zip(ids, asked, strict=True):
        completion = completions[request_id]
        if "logprobs" in flags:
            assert_scored(stock, completion)
        else:
            assert completion.logprobs is None
        if "prompt_logprobs" in flags:
            assert_prompt_scored(stock, completion)
        else:
            assert completion.prompt_logprobs is None


def test_steps_without_an_asker_do_not_compute_them(generator, monkeypatch):
    wanted, launch = [], ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "launch", lambda *args: (wanted.append(args[3]), launch(*args))[1])
    generator.generate(PROMPTS, max_new_tokens=3)
    assert not any(w.sampled or w.prompt for w in wanted)
    config = GenerationConfig(max_new_tokens=2)
    generator.engine.add_request(PROMPTS[0], config, logprobs=True, prompt_logprobs=True)
    generator.engine.add_request(PROMPTS[1], GenerationConfig(max_new_tokens=6))
    del wanted[:]
    run_out(generator.engine)
    assert [w.sampled for w in wanted] == [("processed",)] * 2 + [()] * 4
    assert [bool(w.prompt) for w in wanted] == [True, False, False, False, False, False]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_brings_each_tokens_own(stock, overlap):
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        [expected] = generator.generate(PROMPTS[:1], max_new_tokens=8, logprobs=True)
        tokens, scores, pieces = [], [], 0
        for _, output in generator.stream(PROMPTS[:1], max_new_tokens=8, logprobs=True, prompt_logprobs=True):
            assert len(output.new_logprobs) == len(output.new_token_ids)
            tokens += output.new_token_ids
            scores += output.new_logprobs
            pieces += 1
        assert pieces > 5
        assert tokens == expected.token_ids
        assert_close(scores, expected.logprobs)
        assert output.completion.logprobs == scores
        assert_prompt_scored(stock, output.completion)
        assert [o.new_logprobs for _, o in generator.stream(PROMPTS[:1], max_new_tokens=3)] == [None] * 3
        assert_idle(generator.model)


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_request_keeps_those_of_its_tokens(stock, overlap, steps):
    with PagedGenerator(tiny_model(), overlap=overlap, max_num_batched_tokens=8, max_num_seqs=4) as generator:
        engine = generator.engine
        request_id = engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=30), logprobs=True,
                                        prompt_logprobs=True)
        for _ in range(steps):
            assert not any(output.completion for output in engine.step())
        engine.abort(request_id)
        completion = engine.step()[-1].completion
        assert completion.finish_reason == "abort"
        if completion.token_ids:
            assert_scored(stock, completion)
            assert_prompt_scored(stock, completion)
        else:
            assert completion.logprobs == []
            assert (completion.prompt_logprobs is None) == (steps < 3)  # 20 tokens in steps of 8
        assert_idle(generator.model)


def test_a_request_without_a_valid_distribution_ends_with_those_it_has(generator):
    engine = generator.engine
    engine.add_request(PROMPTS[1], GenerationConfig(max_new_tokens=8), logprobs=True, prompt_logprobs=True)
    outputs = [*engine.step(), *engine.step()]
    with torch.no_grad():
        generator.model.lm_head.weight[3] = torch.nan
    run_out(engine, outputs)
    completion = outputs[-1].completion
    assert completion.finish_reason == "error"
    assert len(completion.logprobs) == len(completion.token_ids) == 2
    assert [score for o in outputs for score in o.new_logprobs] == completion.logprobs
    assert None not in completion.prompt_logprobs[1:]


# -- prompts ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [5, 16, 2048])
def test_prompt_log_probs_are_a_plain_forwards(stock, budget, overlap):
    options = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 8), "overlap": overlap}
    with PagedGenerator(tiny_model(), **options) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=3, prompt_logprobs=True, logprobs=True)
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        assert completion.prompt_token_ids == prompt
        assert_prompt_scored(stock, completion)
        assert_scored(stock, completion)


def test_the_raw_logits_count_whatever_the_tokens_are_drawn_from(stock, generator):
    settings = {"temperature": 0.3, "top_k": 3, "eos_token_id": PROMPTS[0][3], "min_new_tokens": 2}
    for completion in generator.generate(PROMPTS, **SAMPLED, **settings, prompt_logprobs=True):
        assert_prompt_scored(stock, completion)


def test_a_prompt_of_one_token_has_none(generator):
    [completion] = generator.generate([[5]], max_new_tokens=1, prompt_logprobs=True)
    assert completion.prompt_logprobs == [None]


@pytest.mark.parametrize(("name", "value"), [("_MOST_POSITIONS", 7), ("_MOST_LOGITS", 7 * 256)])
def test_the_head_sees_a_bounded_number_of_positions(stock, monkeypatch, name, value):
    monkeypatch.setattr(prompt_scores, name, value)
    sizes = []
    with PagedGenerator(tiny_model()) as generator:
        executor = generator.engine._executor
        logits = executor.shard_logits
        executor.shard_logits = lambda hidden, adapters=None: (sizes.append(len(hidden)), logits(hidden, adapters))[1]
        completions = generator.generate(PROMPTS, max_new_tokens=1, prompt_logprobs=True)
    for completion in completions:
        assert_prompt_scored(stock, completion)
    count = sum(len(p) - 1 for p in PROMPTS)
    assert (sizes[0], set(sizes[1:]), sum(sizes[1:])) == (len(PROMPTS), {7}, count)


def test_a_scored_prompt_fills_the_prefix_cache_and_does_not_read_it(stock, generator):
    for _ in range(2):
        completions = generator.generate(PROMPTS, max_new_tokens=2, prompt_logprobs=True)
        assert [c.num_cached_tokens for c in completions] == [0] * 5
        for completion in completions:
            assert_prompt_scored(stock, completion)
    assert generator.engine.stats().prefix_cache_queries == 0
    completions = generator.generate(PROMPTS, max_new_tokens=2, logprobs=True)
    assert [c.num_cached_tokens for c in completions] == [16, 0, 32, 15, 0]
    for completion in completions:
        assert_scored(stock, completion)


def test_a_continuation_is_scored_as_evaluation_harnesses_do(stock, generator):
    context, continuations = PROMPTS[2], random_prompts([4, 9], seed=5)
    completions = generator.generate([context + c for c in continuations], max_new_tokens=1, prompt_logprobs=True)
    for completion, continuation in zip(completions, continuations, strict=True):
        expected = prompt_scores_of(stock, context + continuation)[len(context) :]
        assert_close([sum(completion.prompt_logprobs[len(context) :])], [sum(expected)])


# -- on the way ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_keeps_them(stock, overlap):
    with PagedGenerator(tiny_model(), num_blocks=9, overlap=overlap) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=40, logprobs=True, prompt_logprobs=True)
        assert generator.engine.stats().num_preemptions > 0
        assert_idle(generator.model)
    for completion in completions:
        assert len(completion.logprobs) == 40
        ids = completion.prompt_token_ids + completion.token_ids
        assert_close(completion.prompt_logprobs[1:] + completion.logprobs, prompt_scores_of(stock, ids)[1:])


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_in_the_middle_of_a_prompt(stock, overlap):
    """Three rows decode and need blocks while a long prompt, the newest request, is computed 5 tokens a step."""
    short, long = random_prompts([14, 14, 14], seed=6), random_prompts([70], seed=7)[0]
    options = {"num_blocks": 11, "max_num_batched_tokens": 8, "max_num_seqs": 4, "overlap": overlap}
    with PagedGenerator(tiny_model(), **options) as generator:
        engine = generator.engine
        for prompt in short:
            engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
        last = engine.add_request(long, GenerationConfig(max_new_tokens=3), logprobs=True, prompt_logprobs=True)
        request, half_way, completion = engine._core.requests[last], False, None
        while engine.has_unfinished():
            before = request.sequence.num_preemptions
            begun = request.prompt_logprobs[1] is not None and request.prompt_logprobs[-1] is None
            for output in engine.step():
                completion = output.completion if output.request_id == last else completion
            half_way |= begun and request.sequence.num_preemptions > before
        assert half_way
        assert_idle(generator.model)
    assert_prompt_scored(stock, completion)
    assert_scored(stock, completion)


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("point", ["launch", "commit"])
def test_a_recovery_after_an_interrupt(stock, overlap, at, point):
    """The request starts over: each token's log-probability is delivered once, and the completion has all.

    An equal prompt runs before it, whose blocks it must not hit then either.
    """
    prompt = PROMPTS[0]
    with PagedGenerator(tiny_model(), overlap=overlap, max_num_batched_tokens=16, max_num_seqs=4) as generator:
        engine = generator.engine
        generator.generate([prompt], max_new_tokens=2)
        engine.add_request(prompt, GenerationConfig(max_new_tokens=12))
        scored = engine.add_request(prompt, GenerationConfig(max_new_tokens=9), logprobs=True, prompt_logprobs=True)
        owner = engine._core.pool.runner if point == "launch" else engine._core.scheduler
        outputs = []
        with raising(owner, point, at, True, Interrupt()), pytest.raises(Interrupt):
            run_out(engine, outputs)
        run_out(engine, outputs)
        assert_idle(generator.model)
    outputs = [output for output in outputs if output.request_id == scored]
    completion = outputs[-1].completion
    assert len(completion.token_ids) == 9
    assert_scored(stock, completion)
    assert_prompt_scored(stock, completion)
    assert completion.num_cached_tokens == 0
    assert [token for o in outputs for token in o.new_token_ids] == completion.token_ids
    assert_close([score for o in outputs for score in o.new_logprobs], completion.logprobs)


def test_a_recovery_forgets_what_was_not_given_out(stock, generator):
    """The model may be another by then; what the caller has stays."""
    engine = generator.engine
    request_id = engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=5), logprobs=True, prompt_logprobs=True)
    outputs = [*engine.step(), *engine.step()]
    engine._core.dirty = True
    engine._core.recover_if_dirty()
    request = engine._core.requests[request_id]
    given = [value for output in outputs for value in output.new_logprobs]
    assert (request.logprobs, request.prompt_logprobs) == (given, [None] * 20) and given
    run_out(engine, outputs)
    assert_scored(stock, outputs[-1].completion)
    assert_prompt_scored(stock, outputs[-1].completion)


def test_a_launch_that_raises(stock, generator):
    engine = generator.engine
    generator.generate([PROMPTS[1]], max_new_tokens=2)
    engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=6), logprobs=True, prompt_logprobs=True)
    outputs = []
    with raising(engine._core.pool.runner, "launch", 3, True, RuntimeError("here")), pytest.raises(RuntimeError):
        run_out(engine, outputs)
    run_out(engine, outputs)
    assert_scored(stock, outputs[-1].completion)
    assert_prompt_scored(stock, outputs[-1].completion)


# -- arguments ------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 129, 2.5, "yes"])
def test_other_values_are_refused(generator, name, value):
    calls = [
        lambda: generator.generate(PROMPTS, max_new_tokens=2, **{name: value}),
        lambda: generator.generate([], max_new_tokens=2, **{name: value}),
        lambda: generator.generate(torch.tensor([[1, 2]]), max_new_tokens=2, **{name: value}),
        lambda: generator.stream(PROMPTS, max_new_tokens=2, **{name: value}),
        lambda: generator.engine.add_request(PROMPTS[0], **{name: value}),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{name}={value!r}: expected True"):
            call()
    assert not generator.engine.has_unfinished()
    generator.generate(PROMPTS[:1], max_new_tokens=1)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_tensors_have_nowhere_to_put_them(generator, name):
    for arguments, keywords in (((torch.tensor([[1, 2]]),), {}), ((), left_padded(PROMPTS))):
        with pytest.raises(ValueError, match="^" + name + ".*tensors"):
            generator.generate(*arguments, **keywords, max_new_tokens=2, **{name: True})
    generator.generate(PROMPTS[:1], max_new_tokens=1)


# -- on a GPU ------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_gpu_graphs_and_eager_steps_agree(stock, options):
    """Prompts come while others decode; graphs captured without log-probabilities do not serve steps with them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, results = random_prompts([5, 40, 17, 3, 60, 33, 1, 90]), {}
    flags = {"logprobs": True, "prompt_logprobs": True}
    for eager in (True, False):
        with PagedGenerator(tiny_model().cuda(), enforce_eager=eager, num_blocks=200, max_num_seqs=3) as generator:
            generator.generate(prompts, max_new_tokens=9, seed=1, **options)
            plain = generator.engine.stats().num_graphs_captured
            generator.engine.reset_prefix_cache()
            results[eager] = [
                *generator.generate(prompts, max_new_tokens=9, seed=1, logprobs=True, **options),
                *generator.generate(prompts, max_new_tokens=9, seed=1, **flags, **options),
            ]
            assert (generator.engine.stats().num_graphs_captured > plain) == (not eager)
    assert [c.token_ids for c in results[True]] == [c.token_ids for c in results[False]]
    for mine, other in zip(results[True], results[False], strict=True):
        assert_close(mine.logprobs, other.logprobs)
        assert_scored(stock, mine, **options)
        if mine.prompt_logprobs is not None:
            assert_prompt_scored(stock, mine)
            assert_prompt_scored(stock, other)


@pytest.mark.gpu
def test_gpu_prompt_log_probs_in_bf16_take_bounded_memory():
    model = tiny_model(vocab_size=150_000, max_position_embeddings=4096).to("cuda", torch.bfloat16)
    prompt = random_prompts([3000], vocab_size=150_000)[0]
    with PagedGenerator(model, num_blocks=300) as generator:
        generator.generate([prompt], max_new_tokens=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        [completion] = generator.generate([prompt], max_new_tokens=1, prompt_logprobs=True)
        taken = torch.cuda.max_memory_allocated() - before
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt], device="cuda")).logits[0]
    assert taken < 400 << 20, "3,000 positions of fp32 logits are 1,800 MB"
    known = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:], device="cuda")[:, None])[:, 0]
    assert (known.cpu() - torch.tensor(completion.prompt_logprobs[1:])).abs().mean() < 0.1
