"""On a GPU: models with a recurrent state have stock's tokens in fp32 and as good ones in bf16, by graphs or not; a
replayed step computes what the eager one does, and snapshots, forks and preemption keep stock's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from on_gpu import assert_fp32_equals_stock, assert_tokens_are_among_stocks_best, cuda, cuda_batch
from recurrent_models import outlined, recurrent_model, run, with_idiom
from support import assert_native_parity, left_padded, random_prompts, stock_generate
from transformers import GenerationConfig, LogitsProcessorList

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor

pytestmark = [pytest.mark.gpu, with_idiom]
NEW = 16
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False)
# Heads of sizes that the kernels of attention take.
SHAPE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
CAPTURED = ("Lfm2", "Mamba2", "NemotronH", "Qwen3_5", "Bamba")
NAMES = (*CAPTURED, "Qwen3Next")  # whose experts run one by one here, which cannot be captured
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LAST = {"NemotronH": 2}  # tokens of a prompt behind its snapshot, where it is not 1


def on_gpu(name, dtype=torch.float32):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sizes = dict(SHAPE) if name != "Mamba2" else {"hidden_size": 64}
    if name == "Bamba":  # its inner size is twice the hidden size
        sizes = {"head_dim": 64, "hidden_size": 256, "mamba_n_heads": 32}
    model = recurrent_model(name, **sizes, **(DELTA if name.startswith("Qwen") else {}))
    return outlined(model.to("cuda", dtype))


def greedy(model, prompts, new_tokens=NEW):
    made = stock_generate(model, **cuda(left_padded(prompts)), max_new_tokens=new_tokens, do_sample=False)
    return made[:, -new_tokens:].tolist()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_equals_stock(name, enforce_eager):
    assert_fp32_equals_stock(on_gpu(name), [30, 17, 70, 1], NEW, name in CAPTURED, enforce_eager=enforce_eager,
                             max_num_seqs=6, max_num_batched_tokens=64)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_tokens_are_among_stocks_best(name, enforce_eager):
    assert_tokens_are_among_stocks_best(on_gpu(name, torch.bfloat16), enforce_eager=enforce_eager)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_replayed_step_computes_what_the_eager_step_does(name, dtype):
    """The same tokens and states, bit for bit; padding rows change the states of no row."""
    with PagedGenerator(on_gpu(name, dtype), strict=True, max_num_seqs=4, max_num_batched_tokens=256) as generator:
        for _ in range(2):  # three rows in graphs of four
            generator.generate(random_prompts([20, 9, 33]), GREEDY, use_tqdm=False)
        runner = generator.engine._core.runner
        graphs, tensors = runner.graphs, runner.cache.states._tensors
        shape, found = next((shape, found) for shape, found in graphs._captured.items() if shape.rows == 4)
        assert found is not None, "the step cannot be captured"
        rows = np.array([[2, 0, 1, runner.state.padding_slot], [21, 10, 34, -1]])
        inputs = rows, graphs.steps.attention.plain_plan(rows[1] + 1, rows[0])
        before = {key: torch.randn(tensor.shape, device="cuda").to(tensor.dtype) for key, tensor in tensors.items()}

        def stepped(step):
            for key, tensor in tensors.items():
                tensor.copy_(before[key])
            return step().tokens[:3].tolist(), {key: tensor[:4].clone() for key, tensor in tensors.items()}

        def replay():
            graphs._send(found, inputs)
            return graphs._replay(found)

        def run():
            with graphs._aside():
                return graphs.steps.run(shape, *graphs.steps._sent(inputs))

        (tokens, eager), (same, replayed) = stepped(run), stepped(replay)
        assert tokens == same
        for key in tensors:
            assert torch.equal(eager[key], replayed[key]), key
            assert torch.equal(eager[key][3], before[key][3]) and not torch.equal(eager[key][:3], before[key][:3])


@pytest.mark.parametrize("name", ["Lfm2", "NemotronH", "Qwen3_5"])
def test_requests_that_come_one_after_another(name):
    model = hf_paged.enable(on_gpu(name), strict=True, max_num_seqs=3, max_num_batched_tokens=64)
    engine, prompts = hf_paged.get_engine(model), random_prompts([30, 5, 17, 1, 23, 40])
    assert list(run(engine, GREEDY, prompts).values()) == greedy(model, prompts)


@pytest.mark.parametrize("budget", [100, 4096])
@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3Next"])
def test_packed_prompts_in_chunks_and_behind_cached_beginnings(name, budget, monkeypatch):
    """The prompts of a step in one forward, and states of no other row; NaN in all slots before."""
    rows, hidden_states = [], RecurrentExecutor.hidden_states

    def watched(self, input_ids, step):
        rows.append((len(step.parts[0][2].slots), len(input_ids)))
        return hidden_states(self, input_ids, step)

    monkeypatch.setattr(RecurrentExecutor, "hidden_states", watched)
    prompts = random_prompts([70, 130, 1, 64, 17, 300, 2, 65])
    with PagedGenerator(on_gpu(name), strict=True, max_num_seqs=8, max_num_batched_tokens=budget) as generator:
        generator.generate([[1]], GREEDY, use_tqdm=False)
        for tensor in generator.engine._core.runner.cache.states._tensors.values():
            tensor.fill_(float("nan"))
        expected, longer = greedy(generator.engine.model, prompts), [prompt + [7, 8, 9, 10] for prompt in prompts]
        made = generator.generate(prompts, GREEDY, use_tqdm=False)
        assert [one.token_ids for one in made] == expected
        made = generator.generate(longer, GREEDY, use_tqdm=False)
        assert [one.token_ids for one in made] == greedy(generator.engine.model, longer)
        assert sum(one.num_cached_tokens for one in made) > 500
    most = max(rows, key=lambda row: row[1] if row[1] > row[0] else 0)
    assert most == ((8, sum(map(len, prompts)) - 7) if budget == 4096 else most) and most[0] > 1


@pytest.mark.parametrize("name", ["Lfm2", "NemotronH", "Qwen3_5"])
def test_prompts_go_on_from_snapshots(name):
    """The same prompt, a longer one, and a turn behind the answer."""
    model, prompt = on_gpu(name), random_prompts([70])[0]
    with PagedGenerator(model, strict=True) as generator:
        first, = generator.generate([prompt], GREEDY, use_tqdm=False)
        known = 70 - LAST.get(name, 1)
        for tokens, cached in ((prompt, known), (prompt + first.token_ids[:-1] + [7, 8, 9], 70 + NEW - 1)):
            again, = generator.generate([tokens], GREEDY, use_tqdm=False)
            assert [again.token_ids] == greedy(model, [tokens])
            assert again.num_cached_tokens == cached


@pytest.mark.parametrize("name", ["Lfm2", "NemotronH", "Qwen3_5"])
def test_the_rows_of_a_group_fork_from_one_prompt(name):
    """With temperatures next to 0, samples are the greedy tokens."""
    model, prompt = on_gpu(name), random_prompts([45])[0]
    with PagedGenerator(model, strict=True, max_num_seqs=8) as generator:
        config = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=1e-4, num_return_sequences=1)
        made = generator.generate([prompt] * 8, config, use_tqdm=False)
    assert [one.token_ids for one in made] == greedy(model, [prompt]) * 8
    assert sum(one.num_cached_tokens == 45 - LAST.get(name, 1) for one in made) == 7


@pytest.mark.parametrize("name", ["Lfm2", "NemotronH", "Qwen3_5"])
def test_preempted_rows_compute_their_states_again(name):
    model = hf_paged.enable(on_gpu(name), strict=True, num_blocks=6, block_size=16, max_num_seqs=4)
    engine, prompts, tokens = hf_paged.get_engine(model), random_prompts([14, 13, 12, 10]), {}
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert engine.stats().num_preemptions > 0
    assert list(tokens.values()) == greedy(model, prompts)


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3_5"])
def test_stocks_loop_over_states(name):
    """Beams, whose forks copy states, and a processor of the caller's own."""
    model = hf_paged.enable(on_gpu(name), strict=True)
    inputs = cuda_batch([30, 17, 1])
    for options in ({"num_beams": 3}, {"logits_processor": LogitsProcessorList([without_last])}):
        expected = stock_generate(model, **inputs, max_new_tokens=7, **options)
        assert torch.equal(model.generate(**inputs, max_new_tokens=7, **options), expected)
    assert hf_paged.get_engine(model).stats().calls["lockstep"].num_calls == 2


def without_last(input_ids, scores):
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("owns", [False, True])
def test_the_pool_is_within_the_budget(owns):
    model = on_gpu("Qwen3_5", torch.bfloat16)
    options = {"gpu_memory_utilization": 0.2, "max_model_len": 256, "max_num_seqs": 16}
    if owns:
        with PagedGenerator(model, strict=True, **options) as generator:
            made = [one.token_ids for one in generator.generate(random_prompts([9]), GREEDY, use_tqdm=False)]
            stats = generator.engine.stats()
    else:
        hf_paged.enable(model, strict=True, **options)
        made = model.generate(**cuda_batch([9]), max_new_tokens=NEW)[:, -NEW:].tolist()
        stats = hf_paged.get_engine(model).stats()
        assert hf_paged.get_engine(model)._core.runner.cache.states.num_slots == 16
        hf_paged.get_engine(model).release_memory()
        assert hf_paged.get_engine(model).stats().kv_cache_bytes == 0
        again = model.generate(**cuda_batch([9]), max_new_tokens=NEW)[:, -NEW:].tolist()
        assert len(again[0]) == NEW
    assert len(made[0]) == NEW and 0 < stats.kv_cache_bytes < 0.2 * torch.cuda.mem_get_info()[1]


def test_a_call_under_autocast_goes_to_stock():
    model = hf_paged.enable(on_gpu("Lfm2"))
    with torch.autocast("cuda", torch.bfloat16), pytest.warns(hf_paged.FallbackWarning, match="on a CPU alone"):
        model.generate(**cuda_batch([9]), max_new_tokens=3)


def test_a_class_is_proved_and_runs():
    """Not by an outline of the tests: the proof runs on the CPU."""
    model = recurrent_model("Qwen3_5", **SHAPE, **DELTA).to("cuda")
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **cuda_batch([30, 17, 1]), max_new_tokens=NEW)
