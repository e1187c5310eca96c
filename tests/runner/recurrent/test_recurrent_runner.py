"""Steps of models with a recurrent state: stock's tokens whatever comes, waits, is preempted, ends or changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from derived_models import assert_scored_as_stock
from recurrent_models import outlined, poison, recurrent_model, run, with_idiom
from support import (
    assert_falls_back,
    assert_idle,
    assert_native_parity,
    batch,
    left_padded,
    random_prompts,
    stock_generate,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig, PagedGenerator
from hf_paged.models import KVSpec, find_executor
from hf_paged.models.base import StateShape
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.runner import memory
from hf_paged.runner.recurrent.recurrent_runner import RecurrentRunner
from hf_paged.runner.recurrent.saved_states import most_snapshots
from hf_paged.runner.recurrent.state_pool import config_for_states

pytestmark = with_idiom

NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False)
PROMPTS = random_prompts([30, 5, 17, 1, 23])


@pytest.fixture(params=["Lfm2", "Mamba2"])
def model(request):
    return outlined(recurrent_model(request.param))


def greedy(model, prompts, new_tokens=NEW):
    made = stock_generate(model, **left_padded(prompts), max_new_tokens=new_tokens, do_sample=False)
    return made[:, -new_tokens:].tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_come_one_after_another(model, overlap):
    hf_paged.enable(model, strict=True, max_num_batched_tokens=13, max_num_seqs=3, overlap=overlap)
    tokens = run(hf_paged.get_engine(model), GREEDY, PROMPTS)
    assert list(tokens.values()) == greedy(model, PROMPTS)


def test_preempted_rows_compute_their_states_again(model):
    hf_paged.enable(model, strict=True, num_blocks=6, block_size=16, max_num_seqs=4)
    engine = hf_paged.get_engine(model)
    prompts = random_prompts([14, 13, 12, 10])
    tokens = run(engine, GREEDY, prompts)
    assert engine.stats().num_preemptions > 0
    assert list(tokens.values()) == greedy(model, prompts)


def test_aborted_rows_leave_their_slots(model):
    hf_paged.enable(model, strict=True, max_num_seqs=2)
    engine = hf_paged.get_engine(model)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
    run(engine, GREEDY)
    table = engine._core.scheduler._table
    assert table.num_free_slots == table.num_slots == 2
    assert_idle(model)
    poison(engine)
    assert list(run(engine, GREEDY, PROMPTS[2:]).values()) == greedy(model, PROMPTS[2:])


def test_sampled_tokens_depend_on_the_seed_alone_and_have_stocks_log_probabilities(model):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "top_k": 0, "logprobs": True,
               "prompt_logprobs": True, "seed": 3}
    with PagedGenerator(model, max_num_batched_tokens=16, max_num_seqs=4) as generator:
        alone, = generator.generate([PROMPTS[0]], **options)
        beside = generator.generate(PROMPTS[:3], **options)
    assert beside[0].token_ids == alone.token_ids
    for completion in beside:
        assert_scored_as_stock(model, completion)


def test_running_rows_are_computed_again_with_new_weights(model):
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    engine.add_request(PROMPTS[0], GREEDY)
    made = [token for _ in range(4) for output in engine.step() for token in output.new_token_ids]
    with hf_paged.weight_update(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(0.9)
    rest, = run(engine, GREEDY).values()
    assert made and [rest] == greedy(model, [PROMPTS[0] + made], NEW - len(made))


def test_an_interrupted_step_is_computed_again(model, monkeypatch):
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    engine.add_request(PROMPTS[0], GREEDY)
    made = [token for _ in range(3) for output in engine.step() for token in output.new_token_ids]
    sample = RecurrentRunner._sample

    def interrupt(*args, **kwargs):
        monkeypatch.setattr(RecurrentRunner, "_sample", sample)
        raise KeyboardInterrupt

    monkeypatch.setattr(RecurrentRunner, "_sample", interrupt)
    with pytest.raises(KeyboardInterrupt):  # behind the forward, which has written states
        engine.step()
    rest, = run(engine, GREEDY).values()
    assert [made + rest] == greedy(model, PROMPTS[:1])


def test_beams_whose_cache_is_returned_go_to_stock(model):
    assert_falls_back(model, "keys and values of beams", **batch([9, 4]), max_new_tokens=3, do_sample=False,
                      num_beams=2, return_dict_in_generate=True)


def test_a_returned_cache_is_stocks(model):
    call = {**batch([9, 9]), "max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    expected = stock_generate(model, **call).past_key_values
    hf_paged.enable(model, strict=True)
    found = model.generate(**call).past_key_values
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert type(one) is type(other)
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(other, name, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(one, name)[index], state, rtol=1e-4, atol=1e-5)


def test_a_class_that_takes_no_state_into_a_chunk_computes_prompts_anew(monkeypatch):
    """Chunks of 19 tokens, log-probabilities of the prompt included."""
    model = outlined(recurrent_model("Jamba"))
    options = {"max_new_tokens": 4, "logprobs": True, "prompt_logprobs": True}
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=6) as generator:
        completions = generator.generate(PROMPTS[:2], **options)
    for completion in completions:
        assert_scored_as_stock(model, completion)
    monkeypatch.setattr(RecurrentExecutor, "whole_prompts", False)
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=6) as generator:
        completions = generator.generate(PROMPTS[:1], **options)
    with pytest.raises(AssertionError):  # so that the test shows it
        assert_scored_as_stock(model, completions[0])


def test_states_snapshots_and_pages_share_a_budget():
    spec = KVSpec(1, 1, 1, 16, torch.float32, torch.float32, torch.device("cpu"),
                  states=(StateShape((0, "conv", 0), (10, 10), torch.float32),))
    assert (spec.state_bytes, spec.block_bytes(16)) == (448, 2048)
    config = config_for_states(PagedConfig(max_num_seqs=64), spec, 8000)
    assert (config.max_num_seqs, config.enable_prefix_caching, config.speculation) == (6, True, False)
    assert config_for_states(PagedConfig(max_num_seqs=64), spec, 1).max_num_seqs == 1
    assert (most_snapshots(spec, 16, 80_000), most_snapshots(spec, 16, 1)) == (4, 1)


def test_states_and_snapshots_leave_the_rest_of_a_gpu_to_pages(monkeypatch):
    """Those that a runner holds already count as used once."""
    total, step = 2 << 30, 50 << 20
    for name, value in {"mem_get_info": (total, total), "memory_reserved": 0, "memory_allocated": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    model = outlined(recurrent_model("Qwen3_5"))
    executor = find_executor(model)(model)
    monkeypatch.setattr(executor, "step_bytes", lambda *sizes: step)
    spec, asked = executor.kv_spec()._replace(device=torch.device("cuda")), PagedConfig(gpu_memory_utilization=0.5)
    monkeypatch.setattr(executor, "kv_spec", lambda: spec)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    budget, config = total // 2 - weights, memory.config_for(asked, executor)
    assert config.max_num_seqs == asked.max_num_seqs <= memory.most_rows(executor, config) == (
        int(budget * 0.375) // spec.state_bytes)
    states = (config.max_num_seqs + 1) * spec.state_bytes + int(budget * 0.125)
    tables, block = memory.table_bytes(config, 20_000), spec.block_bytes(16)
    for held in (0, states // 2):
        blocks = memory.shared_num_blocks(executor, spec, config, 20_000, held_blocks=0, held_states=held)
        left = total // 2 - states - 3 * step - tables + held
        assert left - (1 << 20) < blocks * block <= left
    few = memory.config_for(replace(asked, gpu_memory_utilization=0.001), executor)
    assert 1 <= few.max_num_seqs < 64


def test_the_bytes_of_states_are_counted(model):
    hf_paged.enable(model, strict=True, max_num_seqs=3)
    engine = hf_paged.get_engine(model)
    model.generate(**batch([5]), max_new_tokens=2)
    cache = engine._core.runner.cache
    assert cache.states.num_slots == 3  # and a line of padding rows
    pages = cache.num_blocks * cache.spec.block_bytes(cache.block_size)
    saved = cache.spec.state_bytes + 4 * cache.spec.block_bytes(1)  # in front of the prompt's last token
    assert engine.stats().kv_cache_bytes == pages + 4 * cache.spec.state_bytes + saved


def test_guesses_are_off():
    model = hf_paged.enable(outlined(recurrent_model("Lfm2")), strict=True)
    assert not hf_paged.get_engine(model).config.speculation
    assert_native_parity(model, **batch([9]), max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3)


def test_a_step_is_a_forward_of_each_prompt_and_one_of_all_last_tokens(model, monkeypatch):
    hf_paged.enable(model, strict=True)
    engine, seen, hidden_states = hf_paged.get_engine(model), [], RecurrentExecutor.hidden_states

    def watched(self, input_ids, step):
        seen.append((len(step.parts[0][2].slots), step.parts[0][2].max_query_len))
        return hidden_states(self, input_ids, step)

    engine.add_request([1, 2, 3], GREEDY)
    engine.step()
    monkeypatch.setattr(RecurrentExecutor, "hidden_states", watched)
    for prompt in ([4] * 5, [5] * 3, [6]):
        engine.add_request(prompt, GREEDY)
    engine.step()
    assert seen == [(1, 4), (1, 2), (1, 1), (3, 1)]
