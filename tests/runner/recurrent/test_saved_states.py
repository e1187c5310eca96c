"""Snapshots of recurrent states: prompts go on from the furthest one behind their tokens, with the answers of cold
ones; and nothing that another prompt, salt or model computed is read."""

from __future__ import annotations

import gc

import pytest
import torch
from recurrent_models import outlined, recurrent_model, with_idiom
from support import left_padded, random_prompts, stock_generate
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator

pytestmark = with_idiom

NEW = 6
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False)
SYSTEM, QUESTION, OTHER = random_prompts([37, 14, 9])


@pytest.fixture(params=["Lfm2", "Qwen3Next", "Mamba2"])
def model(request):
    return outlined(recurrent_model(request.param))


def greedy(model, prompt):
    return stock_generate(model, **left_padded([prompt]), max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()


def answer(generator, prompt, **options):
    """The number of cached tokens of a prompt, whose tokens have to be stock's."""
    completion, = generator.generate([prompt], max_new_tokens=NEW, do_sample=False, **options)
    assert completion.token_ids == greedy(generator.engine.model, prompt)
    return completion.num_cached_tokens


def poison(generator):
    """NaN in all slots and free blocks: what no snapshot or cached block has is never read."""
    runner, scheduler = generator.engine._core.runner, generator.engine._core.scheduler
    scheduler.snapshots.drop(scheduler.snapshots._moves.saved())  # of the request that ended last, not copied yet
    scheduler.snapshots.take_moves()
    free = [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_queue if block.digest is None]
    for tensor in runner.cache.states._tensors.values():
        tensor.fill_(float("nan"))
    for tensor in (tensor for tensors in runner.cache.layers for tensor in tensors):
        tensor[free] = float("nan")


@pytest.mark.parametrize("length", [17, 21, 32])
def test_the_same_prompt_computes_its_last_token_alone(model, length):
    with PagedGenerator(model) as generator:
        prompt = SYSTEM[:length]
        assert [answer(generator, prompt) for _ in range(2)] == [0, length - 1]
        answer(generator, OTHER)
        poison(generator)
        assert answer(generator, prompt) == length - 1


def test_a_chat_goes_on_behind_its_last_answer(model):
    with PagedGenerator(model) as generator:
        prompt = SYSTEM
        for turn in range(3):
            cached = answer(generator, prompt)
            assert cached == (len(prompt) - 4 if turn else 0)
            prompt = [*prompt, *greedy(model, prompt), 5, 6, 7]
        answer(generator, QUESTION)
        assert answer(generator, [*SYSTEM, 1, 2]) == len(SYSTEM) - 1


def test_a_third_prompt_hits_where_a_second_has_branched_off(model):
    with PagedGenerator(model, max_num_batched_tokens=23, max_num_seqs=4) as generator:
        cached = [answer(generator, SYSTEM + tail) for tail in (QUESTION, OTHER, [8], [9, 9])]
        assert cached == [0, 0, 32, 37]  # the last one behind the whole common prompt


def test_rows_of_a_group_compute_their_prompt_once(model):
    with PagedGenerator(model) as generator:
        completions = generator.generate([SYSTEM] * 4 + [QUESTION] * 2, max_new_tokens=NEW, do_sample=False)
        assert [one.num_cached_tokens for one in completions] == [0, 36, 36, 36, 0, 13]
        assert generator.engine.stats().prefix_cache_hits == 3 * 36 + 13
        for one, prompt in zip(completions, [SYSTEM] * 4 + [QUESTION] * 2, strict=True):
            assert one.token_ids == greedy(model, prompt)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_one_step_read_what_others_of_it_compute(model, overlap):
    """Block by block: keys and values of a prompt's last token, which lie in a shared block, come before their use."""
    prompts = [SYSTEM[:32], SYSTEM[:32] + [7], SYSTEM[:31], SYSTEM[:32], SYSTEM[:32] + OTHER, SYSTEM[:16]]
    with PagedGenerator(model, overlap=overlap) as generator:
        answer(generator, QUESTION)
        poison(generator)
        completions = generator.generate(prompts, max_new_tokens=NEW, do_sample=False)
        assert [one.num_cached_tokens for one in completions] == [0, 31, 0, 31, 32, 0]
        assert [one.token_ids for one in completions] == [greedy(model, prompt) for prompt in prompts]


def test_a_prompt_hits_under_its_own_salt_alone(model):
    with PagedGenerator(model) as generator:
        cached = [answer(generator, SYSTEM, cache_salt=salt) for salt in (None, "a", "b", "a", None)]
        assert cached == [0, 0, 0, 36, 36]


@pytest.mark.parametrize("is_announced", [True, False])
def test_states_of_other_weights_are_never_hit(model, is_announced):
    def change():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.data.mul_(0.9)

    with PagedGenerator(model) as generator:
        for prompt in (SYSTEM, OTHER):  # one is shorter than a block
            assert answer(generator, prompt) == 0
        if is_announced:
            with generator.engine.weight_update():
                change()
        else:
            change()
        assert [answer(generator, prompt) for prompt in (SYSTEM, SYSTEM)] == [0, 36]
        both = generator.generate([OTHER, OTHER], max_new_tokens=NEW, do_sample=False)
        assert [one.token_ids for one in both] == [greedy(model, OTHER)] * 2


@pytest.mark.parametrize("prompt", [OTHER, SYSTEM], ids=len)  # one is shorter than a block
def test_a_change_while_others_run_is_noticed_before_a_hit(model, prompt):
    with PagedGenerator(model) as generator:
        engine = generator.engine
        engine.add_request(QUESTION, GenerationConfig(max_new_tokens=100, do_sample=False))
        engine.step()

        def run():
            request_id, made = engine.add_request(prompt, GREEDY), []
            while True:
                for output in engine.step():
                    if output.request_id == request_id:
                        made += output.new_token_ids
                        if output.completion is not None:
                            return made, output.completion.num_cached_tokens

        run()
        assert run() == (greedy(model, prompt), len(prompt) - 1)
        for parameter in model.parameters():
            parameter.data.mul_(0.8)
        assert run() == (greedy(model, prompt), 0)
        assert engine.has_unfinished()


def test_weights_that_have_changed_are_not_trusted_again(model):
    with PagedGenerator(model) as generator:
        answer(generator, OTHER)
        with generator.engine.weight_update():
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
        for _ in range(2):  # the second time the cache of the first is trusted
            generator.engine.add_request(QUESTION, GREEDY)
            generator.engine.step()
            generator.engine.step()
            request_id, made = generator.engine.add_request(OTHER, GREEDY), []
            while generator.engine.has_unfinished():
                made += [token for output in generator.engine.step() if output.request_id == request_id
                         for token in output.new_token_ids]
            assert made == greedy(model, OTHER)


def test_states_that_go_on_under_new_weights_are_not_kept(model):
    with PagedGenerator(model, on_weight_change="keep") as generator:
        request_id = generator.engine.add_request(SYSTEM, GREEDY)
        generator.engine.step()
        with generator.engine.weight_update():
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
        while generator.engine.has_unfinished():
            made = generator.engine.step()
        completion, = (output.completion for output in made if output.request_id == request_id)
        assert answer(generator, [*SYSTEM, *completion.token_ids, 1]) == 0


def test_a_launch_that_raises_leaves_no_snapshot(model, monkeypatch):
    with PagedGenerator(model) as generator:
        answer(generator, SYSTEM[:32])
        monkeypatch.setattr(generator.engine._core.runner, "_sample", None)
        with pytest.raises(TypeError):
            generator.generate([SYSTEM], max_new_tokens=NEW)
        monkeypatch.undo()
        poison(generator)
        assert [answer(generator, SYSTEM) for _ in range(2)] == [31, 36]


def test_a_reset_and_a_release_forget_all(model):
    with PagedGenerator(model) as generator:
        for forget in (generator.engine.reset_prefix_cache, generator.engine.release_memory):
            assert [answer(generator, SYSTEM) for _ in range(2)] == [0, 36]
            forget()
            assert not generator.engine._core.scheduler or not len(generator.engine._core.scheduler.snapshots)
        assert answer(generator, SYSTEM) == 0


def test_nothing_is_kept_without_a_prefix_cache(model):
    with PagedGenerator(model, enable_prefix_caching=False) as generator:
        assert [answer(generator, SYSTEM) for _ in range(2)] == [0, 0]
        assert generator.engine._core.scheduler.snapshots is None
        assert not generator.engine._core.runner.cache.states._saved


def test_snapshots_are_few_and_the_oldest_makes_way(model):
    with PagedGenerator(model) as generator:
        answer(generator, OTHER)
        scheduler, states = generator.engine._core.scheduler, generator.engine._core.runner.cache.states
        scheduler.snapshots.capacity = 3
        assert [answer(generator, prompt) for prompt in (SYSTEM, SYSTEM, QUESTION, OTHER)] == [0, 36, 0, 0]
        gc.collect()
        assert len(scheduler.snapshots) == 3 >= len(states._saved)
        assert answer(generator, SYSTEM) == 0  # its blocks are cached still


def test_aborted_requests_leave_states_that_are_right(model):
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=4, overlap=True) as generator:
        engine = generator.engine
        for steps in (1, 2, 3, 5):
            request_id = engine.add_request(SYSTEM, GREEDY)
            for _ in range(steps):
                engine.step()
            engine.abort(request_id)
        assert answer(generator, SYSTEM) == 36


def test_states_with_invalid_logits_are_not_kept(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = float("nan")
    with PagedGenerator(model) as generator:
        answer(generator, SYSTEM)
        completion, = generator.generate([[*SYSTEM, 200, *OTHER]], max_new_tokens=NEW)
        assert completion.finish_reason == "error"
        assert not len(generator.engine._core.scheduler.snapshots)
        assert [answer(generator, SYSTEM) for _ in range(2)] == [0, 36]


@pytest.mark.parametrize("name", ["Jamba", "Mamba"])
def test_a_class_that_computes_prompts_whole_goes_on_by_single_tokens(name):
    model = outlined(recurrent_model(name))
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=4) as generator:
        cached = [answer(generator, prompt) for prompt in (SYSTEM, SYSTEM, [*SYSTEM, 5, 6], SYSTEM + QUESTION)]
        assert cached == [0, 36, 0, 0]
        completions = generator.generate([QUESTION] * 3 + [OTHER, SYSTEM], max_new_tokens=NEW, do_sample=False)
        assert [one.num_cached_tokens for one in completions] == [0, 13, 13, 0, 36]
        expected = [greedy(model, prompt) for prompt in [QUESTION] * 3 + [OTHER, SYSTEM]]
        assert [one.token_ids for one in completions] == expected


def test_whole_prompts_longer_than_a_step_have_steps_of_their_own():
    model = outlined(recurrent_model("Jamba"))
    hf_paged.enable(model, strict=True, max_num_batched_tokens=19, max_num_seqs=4)
    engine, tokens = hf_paged.get_engine(model), {}
    for prompt in (SYSTEM, QUESTION, OTHER, [3] * 6):
        engine.add_request(prompt, GREEDY)
    counts = []
    while engine.has_unfinished():
        before = engine.stats().num_prefill_tokens
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        counts.append(engine.stats().num_prefill_tokens - before)
    assert counts[:3] == [37, 14, 15]
    assert list(tokens.values()) == [greedy(model, prompt) for prompt in (SYSTEM, QUESTION, OTHER, [3] * 6)]
