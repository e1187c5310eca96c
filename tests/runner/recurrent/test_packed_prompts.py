"""Prompts of models whose layers with states kernels compute, packed in one forward: stock's tokens, whatever else is
in it, and which models have it. Without a GPU the kernels' references run."""

from __future__ import annotations

import pytest
import torch
from derived_models import assert_scored_as_stock
from planned_torch import PlannedTorch
from recurrent_models import outlined, poison, recurrent_model, run, with_idiom
from support import left_padded, random_prompts, stock_generate
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.kernels.attention.prefill import FULL_TILE
from hf_paged.models import find_executor
from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.recurrent import mamba2
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.memory import largest_step
from hf_paged.runner.padded_steps import PaddedSteps

pytestmark = with_idiom

NEW = 6
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False)
SYSTEM, QUESTION, OTHER = random_prompts([37, 14, 9])
PROMPTS = random_prompts([30, 5, 17, 1, 70, 2])


@pytest.fixture(params=["Qwen3_5", "Qwen3Next", "Mamba2", "NemotronH", "Bamba", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3_5Moe", "GraniteMoeHybrid"))])
def model(request, forwards):
    return outlined(recurrent_model(request.param))


def least_of(generator):
    """Tokens that prompts compute behind a state, at least."""
    return generator.engine._executor.least_chunk


def greedy(model, prompts):
    made = stock_generate(model, **left_padded(prompts), max_new_tokens=NEW, do_sample=False)
    return made[:, -NEW:].tolist()


def test_a_step_is_a_forward_of_all_prompts_and_one_of_all_last_tokens(model, forwards):
    with PagedGenerator(model, strict=True) as generator:
        engine = generator.engine
        engine.add_request([1, 2, 3], GREEDY)
        engine.step()
        poison_others = engine._core.runner.cache.states._tensors
        for tensor in poison_others.values():
            tensor[1:] = float("nan")
        del forwards[:]
        for prompt in ([4] * 5, [5] * 3, [6]):
            engine.add_request(prompt, GREEDY)
        engine.step()
        assert forwards == ([[4, 2, 1], [1, 1, 1]] if least_of(generator) == 1 else [[3, 1, 1], [2, 2], [1]])


@pytest.mark.parametrize("budget", [13, 200])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_stocks_in_chunks_beside_decode_rows(model, forwards, overlap, budget):
    hf_paged.enable(model, strict=True, max_num_batched_tokens=budget, max_num_seqs=4, overlap=overlap)
    engine = hf_paged.get_engine(model)
    run(engine, GREEDY, [[1]])
    poison(engine)
    assert [*run(engine, GREEDY, PROMPTS).values()] == greedy(model, PROMPTS)
    together = random_prompts([9, 40, 3, 70, 1], seed=4)
    for prompt in together:
        engine.add_request(prompt, GREEDY)
    assert [*run(engine, GREEDY).values()] == greedy(model, together)
    assert any(len(rows) > 1 and max(rows) > 1 for rows in forwards)


def test_preempted_rows_compute_their_states_again(model):
    hf_paged.enable(model, strict=True, num_blocks=6, block_size=16, max_num_seqs=4)
    engine, prompts = hf_paged.get_engine(model), random_prompts([14, 13, 12, 10])
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    assert [*run(engine, GREEDY).values()] == greedy(model, prompts)
    assert engine.stats().num_preemptions > 0


def test_limits_of_steps_are_those_of_the_layer(forwards, monkeypatch):
    model, seen, own = outlined(recurrent_model("Mamba2", time_step_limit=(0.25, 0.75))), [], mamba2.packed_mamba2
    monkeypatch.setattr(mamba2, "packed_mamba2", lambda *args: (seen.append(args[1][-2:]), own(*args))[1])
    with PagedGenerator(model) as generator:
        generator.generate(PROMPTS[:2], GREEDY)
    assert {*seen} == {(0.25, 0.75)}


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_one_step_read_what_others_of_it_compute(model, forwards, overlap):
    """Keys and values of the same forward or of an earlier one, and states of an earlier one."""
    prompts = [SYSTEM[:32], SYSTEM[:32] + [7], SYSTEM[:31], SYSTEM[:32], SYSTEM[:32] + OTHER, SYSTEM[:16]]
    with PagedGenerator(model, overlap=overlap) as generator:
        completions = generator.generate(prompts, max_new_tokens=NEW, do_sample=False)
        expected = [0, 31, 0, 31, 32, 0] if least_of(generator) == 1 else [0, 30, 0, 30, 30, 0]
        assert [one.num_cached_tokens for one in completions] == expected
        assert [one.token_ids for one in completions] == greedy(model, prompts)


def test_a_group_of_rows_with_one_beginning_goes_on_together(model, forwards):
    """Behind the one that computes it, in two forwards and not in one for each row."""
    tails = random_prompts([5, 9, 3, 7], seed=2)
    with PagedGenerator(model) as generator:
        generator.generate([SYSTEM[:33]], max_new_tokens=1, do_sample=False)
        del forwards[:]
        prompts = [SYSTEM[:32] + tail for tail in tails]
        completions = generator.generate(prompts, max_new_tokens=NEW, do_sample=False)
        least = least_of(generator)
        assert {one.num_cached_tokens for one in completions} == {33 - least}
        assert [one.token_ids for one in completions] == greedy(model, prompts)
        assert forwards[:2] == [[len(tail) - 1 for tail in tails], [least] * 4]


def test_a_prompt_goes_on_from_the_state_that_another_of_its_step_saves(model, forwards):
    """Where the cached blocks of the first one end, which no earlier prompt has saved."""
    with PagedGenerator(model) as generator:
        generator.generate([SYSTEM], max_new_tokens=1, do_sample=False)
        del forwards[:]
        prompts = [SYSTEM[:32] + tail for tail in (QUESTION, OTHER)]
        completions = generator.generate(prompts, max_new_tokens=NEW, do_sample=False)
        assert [one.num_cached_tokens for one in completions] == [0, 32]
        assert [one.token_ids for one in completions] == greedy(model, prompts)
        least = least_of(generator)
        assert forwards[:3] == [[32], [14 - least, 9 - least], [least] * 2]


def test_log_probabilities_of_prompts_are_stocks(model):
    with PagedGenerator(model, max_num_batched_tokens=64, max_num_seqs=4) as generator:
        completions = generator.generate(PROMPTS[:3], max_new_tokens=NEW, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)


def executor_of(name):
    """An executor, and its model, which it does not keep alive."""
    model = outlined(recurrent_model(name))
    return find_executor(model)(model), model


def test_which_models_pack(monkeypatch):
    def packs(name):
        executor, _model = executor_of(name)
        return executor.packs_prompts

    assert not packs("Qwen3_5")  # on a CPU
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    names = "Qwen3_5", "Qwen3Next", "Mamba2", "NemotronH", "Lfm2", "OlmoHybrid"
    assert [packs(name) for name in names] == [True, True, True, True, False, False]
    executor, _model = executor_of("Qwen3_5")
    executor.autocast = torch.bfloat16
    assert not executor.packs_prompts


@pytest.mark.parametrize(("dtype", "packs"), [(torch.bfloat16, True), (torch.float32, False)])
def test_heads_that_do_not_fit_in_shared_memory_do_not_pack(dtype, packs, monkeypatch):
    """Of a large GPU, which a CPU counts for."""
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    model = outlined(recurrent_model("Qwen3_5", linear_key_head_dim=256).to(dtype))
    executor = find_executor(model)(model)
    assert executor.why_not_kernels(model.device) is None
    assert executor.packs_prompts is packs


def test_heads_of_mamba2_that_were_not_tried_on_a_gpu_do_not_pack(monkeypatch):
    monkeypatch.setattr(mamba2, "fits", lambda *args: True)
    monkeypatch.setattr(mamba2, "compute_capability", lambda device: (9, 0))
    layer, cuda = recurrent_model("Mamba2").backbone.layers[0].mixer, torch.device("cuda")
    assert mamba2.packs(layer, torch.float32, torch.device("cpu")) and not mamba2.packs(layer, torch.float32, cuda)
    for layer.head_dim, layer.ssm_state_size in ((64, 64), (64, 128)):
        assert mamba2.packs(layer, torch.float32, cuda)
    for capability in ((8, 0), (10, 0), None):
        monkeypatch.setattr(mamba2, "compute_capability", lambda device, capability=capability: capability)
        assert not mamba2.packs(layer, torch.float32, cuda)
    monkeypatch.setattr(mamba2, "compute_capability", lambda device: (9, 0))
    layer.norm.register_forward_hook(lambda *args: None)
    assert not mamba2.packs(layer, torch.float32, cuda)


@pytest.mark.parametrize(("name", "change"), [
    ("Qwen3_5", lambda model: model.model.layers[2].linear_attn.conv1d.register_forward_hook(lambda *args: None)),
    ("Qwen3_5", lambda model: setattr(model.model, "__class__", type("Qwen3_5TextModel", (type(model.model),), {}))),
    ("Mamba2", lambda model: model.backbone.layers[1].mixer.norm.register_forward_pre_hook(lambda *args: None)),
    ("Mamba2", lambda model: setattr(model.backbone.layers[1].mixer, "norm", torch.nn.RMSNorm(128))),
], ids=["a layer with a hook", "a decoder of another file", "a norm with a hook", "another norm"])
def test_a_model_that_is_not_known_by_its_code_does_not_pack(name, change, monkeypatch):
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    executor, model = executor_of(name)
    change(model)
    assert not executor.packs_prompts


@pytest.mark.parametrize(("name", "per_token"), [
    ("Qwen3_5", 4 * (2 * 2 * 16 + 4 * 16 + 2 * 4 * 16) + 4 * 4 * 67),
    ("Mamba2", 4 * (128 + 2 * 2 * 16 + 2 * 128)),
])
def test_the_room_of_a_step_counts_what_kernels_put_down(name, per_token, monkeypatch):
    (_, model), sizes = executor_of(name), []
    for reason in ("a test", None):
        monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device, reason=reason: reason)
        executor = find_executor(model)(model)
        sizes.append(executor.step_bytes(101, 1) - executor.step_bytes(1, 1))
    assert sizes[1] - sizes[0] == 100 * per_token


@torch.no_grad()
def test_dry_runs_list_packed_prompts_which_change_no_row(model, forwards):
    with PagedGenerator(model, max_num_seqs=3, max_num_batched_tokens=64) as generator:
        generator.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        runner = generator.engine._core.runner
        attention = AttentionInputs(PlannedTorch(), runner.spec, runner.state, runner.max_model_len)
        steps = PaddedSteps(runner.executor, runner.cache, runner.state, attention, 64)
        tensors = [tensor[:3] for tensor in runner.cache.states._tensors.values()]
        tensors += [one for pair in runner.cache.layers for one in pair]
        for tensor in tensors:
            tensor.nan_to_num_()  # memory that nothing has written yet
        before = [tensor.clone() for tensor in tensors]
        found = [work for work in dry_runs(steps, 3, 64) if work.func.__name__ == "run_padding_prompt"]
        for work in found:
            work()
        assert all(map(torch.equal, tensors, before))
        sizes = [(*work.args, *work.keywords.values()) for work in found]
        assert sizes == [(FULL_TILE >> i, long) for i in range(FULL_TILE.bit_length()) for long in (False, True)]
        to_come = [work.func.__name__ for work in dry_runs(steps, 3)]  # of decode rows alone
        assert to_come and "run_padding_prompt" not in to_come


def test_the_largest_step_packs_many_prompts(model, forwards, monkeypatch):
    executor = find_executor(model)(model)
    config = hf_paged.PagedConfig(max_num_seqs=3, max_num_batched_tokens=64, enforce_eager=True)
    largest_step(executor, executor.kv_spec(), config, 50)()
    assert forwards[0] == [21, 21, 21]
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: "a test")
    executor = find_executor(model)(model)
    largest_step(executor, executor.kv_spec(), config, 50)()
    assert forwards[-1] == [49]


@pytest.mark.parametrize("change", ["groups", "weight"])
def test_norms_that_the_kernel_does_not_compute_keep_prompts_of_mamba_2_apart(change):
    """Earlier norms know no groups; one of another weight the module broadcasts."""
    norm = (layer := recurrent_model("Mamba2").backbone.layers[0].mixer).norm
    assert mamba2.packs(layer, torch.float32, torch.device("cpu"))
    if change == "groups":
        del norm.group_size
    else:
        norm.weight = torch.nn.Parameter(norm.weight.data[:1])
    assert not mamba2.packs(layer, torch.float32, torch.device("cpu"))
