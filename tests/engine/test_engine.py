"""The engine's own interface: requests in, steps, outputs out."""

from __future__ import annotations

import gc

import pytest
import torch
from support import (
    assert_idle,
    assert_native_parity,
    batch,
    byte_tokenizer,
    lookup_chat,
    lookup_facts,
    random_prompts,
    stock_generate,
    tiny_model,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine.loop import EngineCore
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.scheduler import Scheduler

GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False)


@pytest.fixture
def model():
    return hf_paged.enable(tiny_model(), strict=True)


@pytest.fixture
def engine(model):
    return hf_paged.get_engine(model)


def greedy(model, prompt, new_tokens=12, **kwargs):
    output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=new_tokens, **kwargs)
    return output[0, len(prompt) :].tolist()


def run(engine, limit=500):
    """All outputs until nothing is left: tokens and completion per request."""
    tokens, completions = {}, {}
    for _ in range(limit):
        if not engine.has_unfinished():
            return tokens, completions
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert (output.completion is None) == (output.finish_reason is None)
            if output.completion is not None:
                assert output.request_id not in completions
                completions[output.request_id] = output.completion
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_come_and_go_while_the_engine_steps(overlap):
    model = hf_paged.enable(tiny_model(), strict=True, overlap=overlap)
    engine = hf_paged.get_engine(model)
    prompts = random_prompts([20, 5, 33, 16, 48, 1])
    expected = [greedy(model, p) for p in prompts]
    ids, tokens, completions = [], {}, {}
    while len(ids) < len(prompts) or engine.has_unfinished():
        if len(ids) < len(prompts):
            ids.append(engine.add_request(prompts[len(ids)], GREEDY))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.completion:
                completions[output.request_id] = output.completion
    for request_id, prompt, wanted in zip(ids, prompts, expected, strict=True):
        assert tokens[request_id] == wanted
        completion = completions[request_id]
        assert completion.token_ids == wanted
        assert completion.prompt_token_ids == prompt
        assert (completion.finish_reason, completion.error, completion.text) == ("length", None, None)
        assert completion.logprobs is None
    assert_idle(model)


def test_every_request_has_its_own_settings(model, engine):
    prompts = random_prompts([20, 5, 33])
    free = [greedy(model, p, 30) for p in prompts]
    settings = [
        GenerationConfig(max_new_tokens=3),
        GenerationConfig(max_new_tokens=30, eos_token_id=free[1][7]),
        GenerationConfig(max_new_tokens=30, eos_token_id=[free[2][2], free[2][12]], min_new_tokens=5),
    ]
    ids = [engine.add_request(p, s) for p, s in zip(prompts, settings, strict=True)]
    _, completions = run(engine)
    for request_id, prompt, setting in zip(ids, prompts, settings, strict=True):
        wanted = stock_generate(model, input_ids=torch.tensor([prompt]), generation_config=setting)
        assert completions[request_id].token_ids == wanted[0, len(prompt) :].tolist()
    assert [completions[i].finish_reason for i in ids[:2]] == ["length", "eos"]
    assert completions[ids[1]].token_ids[-1] == free[1][7]  # the EOS is part of the output


def test_without_a_config_the_models_is_used(model, engine):
    model.generation_config.max_new_tokens = 4
    request_id = engine.add_request([1, 2, 3])
    assert len(run(engine)[1][request_id].token_ids) == 4


def test_the_default_length_is_stocks(model, engine):
    request_id = engine.add_request([1, 2, 3])
    assert len(run(engine)[1][request_id].token_ids) == 20


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_prompts_as_list_tuple_and_tensor(model, engine, form):
    prompt = random_prompts([9])[0]
    request_id = engine.add_request(form(prompt), GREEDY)
    assert run(engine)[1][request_id].token_ids == greedy(model, prompt)


def test_one_token_only(model, engine):
    request_id = engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=1))
    tokens, completions = run(engine)
    assert tokens[request_id] == completions[request_id].token_ids == greedy(model, [5, 6, 7], 1)


def test_an_idle_step_brings_nothing(engine):
    assert engine.step() == []
    assert not engine.has_unfinished()


def test_text_comes_in_pieces_that_join_up():
    tokenizer = byte_tokenizer()
    with PagedGenerator(tiny_model(), tokenizer) as generator:
        engine = generator.engine
        request_id = engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=60))
        pieces, completion = [], None
        while engine.has_unfinished():
            for output in engine.step():
                pieces.append(output.new_text)
                completion = output.completion or completion
        assert request_id
        assert len(pieces) > 30
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert "".join(pieces) == completion.text


# -- ends ------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort(overlap, steps):
    model = hf_paged.enable(tiny_model(), strict=True, overlap=overlap)
    engine = hf_paged.get_engine(model)
    prompts = random_prompts([20, 33])
    expected = [greedy(model, p) for p in prompts]
    aborted, kept = (engine.add_request(p, GREEDY) for p in prompts)
    tokens = {aborted: [], kept: []}
    for _ in range(steps):
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.abort(aborted)
    more, completions = run(engine)
    for request_id, new in more.items():
        tokens[request_id] += new
    assert completions[aborted].finish_reason == "abort"
    assert completions[aborted].token_ids == tokens[aborted] == expected[0][: len(tokens[aborted])]
    assert len(tokens[aborted]) <= steps + 1
    assert tokens[kept] == expected[1]
    assert completions[kept].finish_reason == "length"
    assert_idle(model)


def test_abort_of_an_unknown_or_finished_request(engine):
    with pytest.raises(KeyError):
        engine.abort("nobody")
    request_id = engine.add_request([1, 2], GREEDY)
    run(engine)
    with pytest.raises(KeyError):
        engine.abort(request_id)


def test_what_others_drove_to_the_end_is_kept_for_the_next_step(model, engine):
    prompt = random_prompts([20])[0]
    request_id = engine.add_request(prompt, GenerationConfig(max_new_tokens=5))
    model.generate(**batch([33, 7]), max_new_tokens=30)
    assert engine.stats().num_running == 0
    assert engine.has_unfinished()
    outputs = engine.step()
    assert {o.request_id for o in outputs} == {request_id}
    assert [t for o in outputs for t in o.new_token_ids] == greedy(model, prompt, 5)
    assert outputs[-1].completion.finish_reason == "length"
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_a_generate_call_does_not_swallow_requests_that_are_longer(model, engine):
    prompt = random_prompts([20])[0]
    request_id = engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
    model.generate(**batch([33, 7]), max_new_tokens=5)
    tokens, completions = run(engine)
    assert tokens[request_id] == completions[request_id].token_ids == greedy(model, prompt, 30)


def test_priorities_are_served_first():
    model = hf_paged.enable(tiny_model(), max_num_seqs=1)
    engine = hf_paged.get_engine(model)
    late = engine.add_request([1, 2, 3], GREEDY, priority=5)
    soon = engine.add_request([1, 2, 4], GREEDY, priority=-1)
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.completion]
    assert order == [soon, late]


# -- stats and memory ------------------------------------------


def test_stats_follow_a_request_through_its_life(model, engine):
    assert engine.stats().kv_cache_bytes == 0
    engine.add_request(random_prompts([20])[0], GREEDY)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (1, 0, stats.num_blocks - 1)
    # 2 layers, K and V, 16 tokens, 2 heads of 16 fp32 numbers
    assert stats.kv_cache_bytes == stats.num_blocks * 2 * 2 * 16 * 2 * 16 * 4
    engine.step()
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_prefill_tokens) == (0, 1, 20)
    assert stats.num_free_blocks == stats.num_blocks - 1 - 2
    run(engine)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_generated_tokens) == (0, 0, 12)
    assert stats.num_steps == 12
    assert stats.prefix_cache_queries == 20


def test_reset_prefix_cache(model, engine):
    prompt = random_prompts([40])[0]
    request_id = engine.add_request(prompt, GREEDY)
    engine.step()
    assert engine.reset_prefix_cache() is False
    run(engine)
    assert engine.reset_prefix_cache() is True
    request_id = engine.add_request(prompt, GREEDY)
    assert run(engine)[1][request_id].num_cached_tokens == 0
    request_id = engine.add_request(prompt, GREEDY)
    assert run(engine)[1][request_id].num_cached_tokens == 32


def test_release_memory_and_back(model, engine):
    first = assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    before = engine.stats()
    engine.release_memory()
    stats = engine.stats()
    assert (stats.kv_cache_bytes, stats.num_blocks, stats.num_free_blocks) == (0, 0, 0)
    assert stats.num_generated_tokens == before.num_generated_tokens
    assert torch.equal(assert_native_parity(model, **batch([40, 33]), max_new_tokens=8), first)
    assert engine.stats().kv_cache_bytes > 0
    assert engine.stats().prefix_cache_hits == before.prefix_cache_hits == 0


def test_release_memory_is_refused_while_a_request_runs(model, engine):
    prompt = random_prompts([20])[0]
    request_id = engine.add_request(prompt, GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests"):
        engine.release_memory()
    assert run(engine)[1][request_id].token_ids == greedy(model, prompt)


def test_counters_survive_an_engine_that_recovers(model, engine):
    """Preemptions and hits counted by a scheduler that an interrupt threw away stay counted."""
    assert_native_parity(model, **batch([40]), max_new_tokens=8)
    assert_native_parity(model, **batch([40]), max_new_tokens=8)
    before = engine.stats()
    assert before.prefix_cache_hits == 32

    class Raising:
        def put(self, value):
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        model.generate(**batch([5], seed=9), max_new_tokens=8, streamer=Raising())
    assert engine.stats().prefix_cache_hits == before.prefix_cache_hits
    assert engine.stats().num_generated_tokens > before.num_generated_tokens


# -- bad input ------------------------------------------

BAD_REQUESTS = {
    "empty prompt": (ValueError, "prompt_token_ids", {"prompt_token_ids": []}),
    "id beyond the vocabulary": (ValueError, r"256.*\[0, 256\)", {"prompt_token_ids": [3, 256]}),
    "huge id": (ValueError, "prompt_token_ids", {"prompt_token_ids": [3, 2**70]}),
    "negative id": (ValueError, "-1", {"prompt_token_ids": [3, -1]}),
    "float id": (TypeError, "prompt_token_ids", {"prompt_token_ids": [3, 1.0]}),
    "bool id": (TypeError, "prompt_token_ids", {"prompt_token_ids": [3, True]}),
    "None id": (TypeError, "prompt_token_ids", {"prompt_token_ids": [3, None]}),
    "text": (TypeError, "prompt_token_ids", {"prompt_token_ids": "hello"}),
    "bytes": (TypeError, "prompt_token_ids", {"prompt_token_ids": b"hello"}),
    "None": (TypeError, "prompt_token_ids", {"prompt_token_ids": None}),
    "a number": (TypeError, "prompt_token_ids", {"prompt_token_ids": 7}),
    "scalar tensor": (TypeError, "prompt_token_ids", {"prompt_token_ids": torch.tensor(7)}),
    "float tensor": (TypeError, "prompt_token_ids", {"prompt_token_ids": torch.tensor([7.0])}),
    "nested": (TypeError, "prompt_token_ids", {"prompt_token_ids": [[3, 4]]}),
    "as long as max_model_len": (ValueError, "max_model_len is 512", {"prompt_token_ids": [3] * 512}),
    "config as dict": (TypeError, "generation_config", {"generation_config": {"max_new_tokens": 3}}),
    "negative temperature": (ValueError, "temperature", {"temperature": -1.0}),
    "zero temperature": (ValueError, "temperature", {"temperature": 0.0}),
    "temperature as str": (TypeError, "temperature", {"temperature": "hot"}),
    "top_p above 1": (ValueError, "top_p", {"top_p": 1.5}),
    "negative top_k": (ValueError, "top_k", {"top_k": -5}),
    "zero new tokens": (ValueError, "max_new_tokens", {"max_new_tokens": 0}),
    "beams": (hf_paged.UnsupportedOptionError, "num_beams=2", {"num_beams": 2}),
    "guidance": (hf_paged.UnsupportedOptionError, "guidance_scale", {"guidance_scale": 1.2}),
    "negative repetition penalty": (ValueError, "repetition_penalty=-1.2", {"repetition_penalty": -1.2}),
    "negative seed": (ValueError, "seed", {"seed": -1}),
    "seed as str": (TypeError, "seed", {"seed": "1"}),
    "huge seed": (ValueError, "seed", {"seed": 2**63}),
    "id in use": (ValueError, "request_id='mine'", {"request_id": "mine"}),
    "id as number": (TypeError, "request_id", {"request_id": 5}),
    "priority as str": (TypeError, "priority", {"priority": "high"}),
    "several sequences": (ValueError, "num_return_sequences", {"num_return_sequences": 2, "temperature": 1.0}),
    "eos beyond words": (TypeError, "eos_token_id", {"eos_token_id": "</s>"}),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_harms_nobody(model, engine, name):
    error, message, kwargs = BAD_REQUESTS[name]
    prompt = random_prompts([20])[0]
    good = engine.add_request(prompt, GREEDY, request_id="mine")
    engine.step()
    config = GenerationConfig(max_new_tokens=12)
    arguments = {"prompt_token_ids": [3, 4], "generation_config": config}
    for key, value in kwargs.items():
        if key in ("prompt_token_ids", "generation_config", "request_id", "priority", "seed"):
            arguments[key] = value
        else:
            setattr(config, key, value)
            config.do_sample = key in ("temperature", "top_p", "top_k") or config.do_sample
    with pytest.raises(error, match=message):
        engine.add_request(**arguments)
    _, completions = run(engine)
    assert list(completions) == [good]
    assert completions[good].token_ids == greedy(model, prompt)
    assert_idle(model)


def test_a_prompt_longer_than_the_pool_is_refused():
    model = hf_paged.enable(tiny_model(), num_blocks=4)
    engine = hf_paged.get_engine(model)
    with pytest.raises(ValueError, match=r"prompt_token_ids of 49 tokens.*KV pool"):
        engine.add_request([3] * 49, GREEDY)
    request_id = engine.add_request([3] * 48, GenerationConfig(max_new_tokens=1))
    assert run(engine)[1][request_id].finish_reason == "length"


def test_an_output_that_outgrows_the_pool_ends_alone_with_an_error():
    model = hf_paged.enable(tiny_model(), num_blocks=4, overlap=True)
    engine = hf_paged.get_engine(model)
    big, small = random_prompts([40, 20])
    big_id = engine.add_request(big, GenerationConfig(max_new_tokens=100))
    small_id = engine.add_request(small, GREEDY)
    _, completions = run(engine)
    assert completions[big_id].finish_reason == "error"
    assert "KV pool" in completions[big_id].error
    assert completions[big_id].token_ids == greedy(model, big, 9)[: len(completions[big_id].token_ids)]
    assert completions[small_id].token_ids == greedy(model, small)
    assert_idle(model)


def test_an_output_that_reaches_max_model_len_ends_there():
    model = hf_paged.enable(tiny_model(), max_model_len=30)
    engine = hf_paged.get_engine(model)
    prompt = random_prompts([20])[0]
    request_id = engine.add_request(prompt, GenerationConfig(max_new_tokens=100))
    completion = run(engine)[1][request_id]
    assert (completion.finish_reason, completion.token_ids) == ("length", greedy(model, prompt, 10))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [False, True])
def test_nan_ends_the_request_that_meets_it_and_no_other(overlap, sampling):
    model = tiny_model()
    prompts = [[5, 6, 7, 8], [5, 99, 7, 8], [9, 10, 11], [99] * 20]
    expected = [greedy(model, p) for p in prompts]
    assert not any(99 in tokens for tokens in (expected[0], expected[2]))
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = torch.nan
    hf_paged.enable(model, overlap=overlap)
    engine = hf_paged.get_engine(model)
    config = GenerationConfig(max_new_tokens=12, do_sample=sampling, top_k=1)
    ids = [engine.add_request(p, config) for p in prompts]
    _, completions = run(engine)
    for i in (0, 2):
        assert completions[ids[i]].token_ids == expected[i]
        assert (completions[ids[i]].finish_reason, completions[ids[i]].error) == ("length", None)
    for i in (1, 3):
        assert completions[ids[i]].finish_reason == "error"
        assert "NaN" in completions[ids[i]].error
        assert completions[ids[i]].token_ids == []
    assert_idle(model)


def test_nan_that_shows_up_later_keeps_the_tokens_made_before(model, engine):
    prompt = random_prompts([20])[0]
    expected = greedy(model, prompt)
    later = next(i for i in range(3, 12) if expected[i] not in prompt + expected[:i])
    with torch.no_grad():
        model.model.embed_tokens.weight[expected[later]] = torch.nan
    request_id = engine.add_request(prompt, GREEDY)
    completion = run(engine)[1][request_id]
    assert completion.finish_reason == "error"
    assert completion.token_ids == expected[: later + 1]
    assert_idle(model)


def test_keys_computed_with_nan_are_not_served_later(model, engine):
    prompt = random_prompts([40])[0]
    expected = greedy(model, prompt)
    weight = model.model.embed_tokens.weight
    kept = weight[prompt[3]].detach().clone()
    with torch.no_grad():
        weight[prompt[3]] = torch.nan
    request_id = engine.add_request(prompt, GREEDY)
    assert run(engine)[1][request_id].finish_reason == "error"
    weight.data[prompt[3]] = kept
    request_id = engine.add_request(prompt, GREEDY)
    assert run(engine)[1][request_id].token_ids == expected


def test_a_model_that_cannot_run_natively_is_refused(model, engine):
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(hf_paged.UnsupportedModelError, match="lm_head has a forward hook"):
        engine.add_request([1, 2], GREEDY)
    handle.remove()
    engine.add_request([1, 2], GREEDY)
    assert len(run(engine)[1]) == 1


@pytest.mark.parametrize("number_before", [1, 2])
def test_requests_that_came_before_a_change_of_the_model_end_with_its_reason(model, engine, number_before):
    """`add_request` looks once between two steps, and the step that takes requests in looks for all of them."""
    ids = [engine.add_request([1, 2, 3], GREEDY) for _ in range(number_before)]
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    ids.append(engine.add_request([4, 5], GREEDY))
    completions = run(engine)[1]
    handle.remove()
    assert all(completions[i].finish_reason == "error" for i in ids)
    assert all("lm_head has a forward hook" in completions[i].error for i in ids)
    engine.add_request([1, 2], GREEDY)
    assert [c.finish_reason for c in run(engine)[1].values()] == ["length"]


# -- sampling ------------------------------------------

SAMPLE = GenerationConfig(max_new_tokens=15, do_sample=True, temperature=1.5, top_k=0, top_p=0.95)


@pytest.mark.parametrize("paged", [
    {}, {"overlap": True}, {"num_blocks": 12}, {"max_num_batched_tokens": 10, "max_num_seqs": 8},
])
def test_a_seeded_request_samples_the_same_tokens_whatever_else_is_in_the_batch(paged):
    prompt = random_prompts([20])[0]
    lonely_model = hf_paged.enable(tiny_model())
    alone = hf_paged.get_engine(lonely_model)
    request_id = alone.add_request(prompt, SAMPLE, seed=7)
    expected = run(alone)[1][request_id].token_ids
    model = hf_paged.enable(tiny_model(), **paged)
    engine = hf_paged.get_engine(model)
    others = random_prompts([33, 5, 16, 40], seed=3)
    configs = [GREEDY, SAMPLE, GenerationConfig(max_new_tokens=25, do_sample=True, top_k=3, min_p=0.1), GREEDY]
    for i in (0, 1):
        engine.add_request(others[i], configs[i], seed=i)
    engine.step()
    mine = engine.add_request(prompt, SAMPLE, seed=7)
    engine.step()
    for i in (2, 3):
        engine.add_request(others[i], configs[i], seed=7)
    assert run(engine)[1][mine].token_ids == expected


def test_seeds_differ_and_without_one_torchs_generator_decides(engine):
    prompt = random_prompts([20])[0]

    def tokens(seed=None, manual=None):
        if manual is not None:
            torch.manual_seed(manual)
        request_id = engine.add_request(prompt, SAMPLE, seed=seed)
        return run(engine)[1][request_id].token_ids

    assert tokens(7) == tokens(7) != tokens(8)
    assert tokens(manual=1) == tokens(manual=1) != tokens(manual=2)
    torch.manual_seed(1)
    assert tokens() != tokens()


def test_greedy_requests_do_not_touch_torchs_generator(model):
    state = torch.get_rng_state()
    model.generate(**batch([20, 7]), max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), state)


# -- the trained model ------------------------------------------


def _answer(engine, tokenizer, prompt):
    request_id = engine.add_request(prompt, GenerationConfig(max_new_tokens=24))
    completion = run(engine)[1][request_id]
    return tokenizer.decode(completion.token_ids, skip_special_tokens=True), completion


def test_questions_about_one_table_share_it_and_get_their_own_answers(trained_model, trained_tokenizer):
    engine = hf_paged.get_engine(hf_paged.enable(trained_model))
    facts = lookup_facts(40)
    for i, name in enumerate(list(facts)[::6]):
        prompt = trained_tokenizer.apply_chat_template(
            lookup_chat(facts, name), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        text, completion = _answer(engine, trained_tokenizer, prompt)
        assert text == f"{name}: {facts[name]}"
        assert completion.finish_reason == "eos"
        table_blocks = (len(prompt) - 30) // 16  # the question is less than 30 tokens
        assert completion.num_cached_tokens % 16 == 0
        assert completion.num_cached_tokens >= (table_blocks * 16 if i else 0)
        assert (completion.num_cached_tokens > 0) == (i > 0)


def test_swapped_block_table_entries_change_the_answer(trained_model, trained_tokenizer):
    """Two requests over tables with the same names and other codes: each answers with what its block table points to.

    (Two entries of one request may be swapped without effect: positions are part of the keys.)
    """
    engine = hf_paged.get_engine(hf_paged.enable(trained_model, enable_prefix_caching=False, block_size=32))
    mine = lookup_facts(40)
    other = dict(zip(mine, lookup_facts(40, seed=1).values(), strict=True))
    text = trained_tokenizer.apply_chat_template(lookup_chat(mine, "x-y"), tokenize=False)
    offsets = trained_tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    tried = 0
    for name in mine:
        start = text.index(f"{name}: {mine[name]}")
        line = [i for i, (a, b) in enumerate(offsets) if b > start and a < start + len(f"{name}: {mine[name]}")]
        column = line[0] // 32
        if line[-1] // 32 != column or tried == 4:
            continue
        tried += 1
        prompts = [
            trained_tokenizer.apply_chat_template(
                lookup_chat(table, name), add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for table in (mine, other)
        ]
        for swap in (False, True):
            answers = _answers_with_swap(engine, trained_tokenizer, prompts, column if swap else None)
            expected = [f"{name}: {mine[name]}", f"{name}: {other[name]}"]
            assert answers == (expected[::-1] if swap else expected)
    assert tried == 4


def _answers_with_swap(engine, tokenizer, prompts, column):
    """Answers to two prompts whose block tables exchange the entry `column` once both prompts are computed."""
    ids = [engine.add_request(prompt, GenerationConfig(max_new_tokens=24)) for prompt in prompts]
    engine.step()
    if column is not None:
        table = engine._core.pool.runner.state.block_table
        slots = [engine._core.requests[request_id].sequence.slot for request_id in ids]
        table[slots, column] = table[slots[::-1], column].clone()
    _, completions = run(engine)
    return [tokenizer.decode(completions[i].token_ids, skip_special_tokens=True) for i in ids]


# -- the caller's surroundings ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("weights", "ambient"), [
    (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16),
])
def test_steps_under_ambient_autocast_compute_in_the_weights_dtype(weights, ambient, overlap):
    """A request may come in before its caller enters autocast; what it caches serves callers outside."""
    model = hf_paged.enable(tiny_model().to(weights), strict=True, overlap=overlap)
    engine = hf_paged.get_engine(model)
    prompt = random_prompts([40])[0]
    expected = greedy(model, prompt)
    request_id = engine.add_request(prompt, GREEDY)
    with torch.autocast("cpu", ambient):
        tokens, _ = run(engine)
    assert tokens[request_id] == expected
    assert_native_parity(model, input_ids=torch.tensor([prompt]), max_new_tokens=12)
    assert engine.stats().prefix_cache_hits > 0


def test_a_request_that_comes_in_under_autocast_is_refused_also_after_one_that_did_not(model, engine):
    """Its caller would get other tokens from stock; the model was looked at before, and not under autocast."""
    engine.add_request([1, 2, 3], GREEDY)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(hf_paged.UnsupportedModelError, match="autocast"):
        engine.add_request([4, 5], GREEDY)
    assert [c.finish_reason for c in run(engine)[1].values()] == ["length"]


# -- names ------------------------------------------


def test_names_that_the_engine_would_give_itself_are_the_users_too(model, engine):
    prompts = random_prompts([20, 9, 5])
    expected = [greedy(model, p) for p in prompts]
    for number in (1, 0):
        engine.add_request(prompts[number], GREEDY, request_id=f"request-{number}")
    made = engine.add_request(prompts[2], GREEDY)
    assert made not in ("request-0", "request-1")
    output = model.generate(input_ids=torch.tensor([prompts[0]]), max_new_tokens=12)
    assert output[0, 20:].tolist() == expected[0]
    tokens, _ = run(engine)
    assert tokens == {"request-0": expected[0], "request-1": expected[1], made: expected[2]}


def test_eos_ids_that_no_tensor_could_hold(model, engine):
    prompt = random_prompts([20])[0]
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[2**40, 256, 10_000], min_new_tokens=4)
    request_id = engine.add_request(prompt, config)
    _, completions = run(engine)
    assert completions[request_id].token_ids == greedy(model, prompt)
    assert completions[request_id].finish_reason == "length"


# -- abandoned streams ------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("owner", "name"), [
    (Scheduler, "schedule"), (Scheduler, "commit"), (ModelRunner, "launch"), (EngineCore, "end"),
], ids=["schedule", "commit", "launch", "end"])
def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it(overlap, owner, name, monkeypatch):
    """The cycle collector runs wherever something is allocated: also in a step, by the thread that holds the lock."""
    prompts = random_prompts([20, 7, 33])
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        model, engine = generator.model, generator.engine

        class Holder:
            pass

        gc.collect()
        gc.disable()
        try:
            holder = Holder()
            holder.me = holder
            holder.stream = generator.stream(prompts[:2], max_new_tokens=30)
            for _ in range(3):
                next(holder.stream)
            del holder
            method, calls = getattr(owner, name), []

            def collecting(self, *args):
                calls.append(engine.stats().num_running)
                if len(calls) == (1 if name == "end" else 2):
                    gc.collect()
                return method(self, *args)

            monkeypatch.setattr(owner, name, collecting)
            for _ in range(2):
                inputs = {"input_ids": torch.tensor([prompts[2]])}
                expected = stock_generate(model, **inputs, max_new_tokens=10)
                assert torch.equal(model.generate(**inputs, max_new_tokens=10), expected)
        finally:
            gc.enable()
        assert max(calls) >= 3 or name == "end"  # the stream was still running when it was collected
        assert_idle(model)


def test_a_model_disabled_by_the_collector_in_the_middle_of_a_step(monkeypatch):
    """A generator in a cycle closes itself there."""
    model = tiny_model()
    prompt = random_prompts([20])[0]

    class Holder:
        pass

    gc.collect()
    gc.disable()
    try:
        holder = Holder()
        holder.me, holder.generator = holder, PagedGenerator(model)
        engine = holder.generator.engine
        engine.add_request(prompt, GREEDY)
        del holder
        schedule = Scheduler.schedule
        monkeypatch.setattr(Scheduler, "schedule", lambda self: (gc.collect(), schedule(self))[1])
        engine.step()
    finally:
        gc.enable()
    assert not hf_paged.is_enabled(model)
    assert engine.stats().kv_cache_bytes == 0
    monkeypatch.undo()
    with PagedGenerator(model) as again:
        assert again.generate([prompt], max_new_tokens=12)[0].token_ids == greedy(model, prompt)
