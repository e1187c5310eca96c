"""On a GPU: the same tokens as stock, memory that goes and comes back, the caller's device and stream left alone."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from on_gpu import cuda
from support import (
    assert_idle,
    assert_native_parity,
    assert_same_tensor,
    batch,
    lookup_chat,
    lookup_facts,
    stock_generate,
    tiny_model,
)
from threads import run_threads
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_paged
from hf_paged import PagedGenerator

pytestmark = pytest.mark.gpu
# Head sizes that the Triton kernels take; margins stay wide (support.tiny_model).
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128}


def on_gpu(dtype=torch.float32, **overrides):
    return tiny_model(**(SHAPE | overrides)).to("cuda", dtype)


@pytest.fixture
def trained(trained_path):
    model = AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.bfloat16).cuda().eval()
    yield model
    hf_paged.disable(model)


def trained_inputs(tokenizer):
    tables = [lookup_facts(count, seed=count) for count in (3, 20, 45, 90)]
    questions = [(table, name) for table in tables for name in list(table)[:: max(1, len(table) // 4)]]
    texts = [
        tokenizer.apply_chat_template(lookup_chat(*question), add_generation_prompt=True, tokenize=False)
        for question in questions
    ]
    answers = [f"{name}: {table[name]}" for table, name in questions]
    return cuda(dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))), answers


@pytest.mark.parametrize("paged", [
    {}, {"overlap": False}, {"block_size": 32}, {"block_size": 256}, {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 256, "max_num_seqs": 32}, {"num_blocks": 80}, {"attention_backend": "torch"},
])
def test_the_trained_model_in_bf16_equals_stock_token_for_token(trained, trained_tokenizer, paged):
    inputs, answers = trained_inputs(trained_tokenizer)
    expected = stock_generate(trained, **inputs, max_new_tokens=24)
    hf_paged.enable(trained, strict=True, **paged)
    for _ in range(2):  # the second call hits the first one's prefixes
        output = assert_native_parity(trained, expected, **inputs, max_new_tokens=24)
        texts = trained_tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert texts == answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_random_models_in_fp32_equal_stock(overlap, rows):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = hf_paged.enable(on_gpu(), strict=True, overlap=overlap)
    inputs = cuda(batch([1, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 64, 65, 70, 3][-rows:]))
    expected = stock_generate(model, **inputs, max_new_tokens=20)
    free = expected[:, inputs["input_ids"].shape[1] :]
    assert_native_parity(model, expected, **inputs, max_new_tokens=20)
    assert_native_parity(model, **inputs, max_new_tokens=20, eos_token_id=[int(free[0, 3]), int(free[-1, 8])])


def test_preemption_with_overlap():
    model = hf_paged.enable(on_gpu(), strict=True, num_blocks=13, overlap=True)
    assert_native_parity(model, **cuda(batch([30, 17, 25, 9, 31, 16, 3, 28])), max_new_tokens=40)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_input_ids_on_the_host_give_output_on_the_host():
    model, inputs = on_gpu(), batch([20, 7])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = stock_generate(model, **inputs, max_new_tokens=5)
        hf_paged.enable(model)
        assert_same_tensor(model.generate(**inputs, max_new_tokens=5), expected)


def test_a_wrong_token_id_raises_on_the_host_and_the_gpu_lives_on():
    model = hf_paged.enable(on_gpu(), strict=True)
    with pytest.raises(IndexError):
        model.generate(input_ids=torch.tensor([[3, 10_000]], device="cuda"), max_new_tokens=3)
    assert_native_parity(model, **cuda(batch([20, 7])), max_new_tokens=5)


def test_sampling_is_repeatable_and_independent_of_the_batch():
    model = hf_paged.enable(on_gpu(), strict=True)
    inputs = cuda(batch([20, 7, 33]))
    options = {"max_new_tokens": 15, "do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(1)
    first = model.generate(**inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **options), first)
    engine = hf_paged.get_engine(model)
    config = GenerationConfig(**options)

    def sampled(others):
        mine = engine.add_request([5, 6, 7], config, seed=3)
        for i in range(others):
            engine.add_request([8 + i] * (i + 1), config, seed=i)
        tokens = None
        while engine.has_unfinished():
            for output in engine.step():
                if output.completion and output.request_id == mine:
                    tokens = output.completion.token_ids
        return tokens

    assert sampled(0) == sampled(7)


def test_fp32_noise_is_the_same_on_gpu_and_cpu():
    from hf_paged.sampling.gumbel import exponential_noise

    seeds, positions = torch.arange(5) * 2**40 + 7, torch.arange(5)
    gpu = exponential_noise(seeds.cuda(), positions.cuda(), 1000).cpu()
    torch.testing.assert_close(gpu, exponential_noise(seeds, positions, 1000), rtol=1e-5, atol=1e-12)


def test_weights_changed_in_place_by_a_fused_optimizer():
    model = hf_paged.enable(on_gpu(), strict=True)
    inputs = cuda(batch([70, 40]))
    first = assert_native_parity(model, **inputs, max_new_tokens=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=inputs["input_ids"], labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    second = assert_native_parity(model, **inputs, max_new_tokens=10)
    assert not torch.equal(first, second)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == before
    assert_native_parity(model, **inputs, max_new_tokens=10)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == before + 64 + 32


def test_training_while_enabled_equals_a_stock_copy():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = hf_paged.enable(on_gpu())
        stock = tiny_model(**SHAPE).cuda()
        ids = batch([40, 40])["input_ids"].cuda()
        for candidate in (model, stock):
            optimizer = torch.optim.AdamW(candidate.parameters(), lr=1e-3)
            for _ in range(2):
                if candidate is model:
                    candidate.generate(**cuda(batch([20, 7])), max_new_tokens=4)
                candidate(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_goes_and_comes_back():
    model = on_gpu()
    inputs = cuda(batch([20, 7]))
    model(**inputs)  # cuBLAS workspaces stay
    gc.collect()  # what earlier tests left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hf_paged.enable(model, strict=True, num_blocks=20_000)
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, **inputs, max_new_tokens=5)
    exactly = 20_000 * 2 * 2 * 16 * 2 * 64 * 4
    held = engine.stats().kv_cache_bytes
    assert exactly <= held < exactly + 4 * (2 << 20)  # each tensor may take whole pieces of 2 MiB
    engine.release_memory()
    assert engine.stats().kv_cache_bytes == 0
    assert torch.cuda.memory_allocated() - before < held / 10
    assert_native_parity(model, **inputs, max_new_tokens=5)
    assert engine.stats().kv_cache_bytes == held
    hf_paged.disable(model)
    assert torch.cuda.memory_allocated() - before < held / 10


def test_enabling_takes_no_memory_and_a_small_call_little():
    model = on_gpu()
    gc.collect()  # what earlier tests left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hf_paged.enable(model)
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    model.generate(**cuda(batch([20, 7])), max_new_tokens=5)
    stats = hf_paged.get_engine(model).stats()
    assert stats.kv_cache_bytes < 16 << 20
    assert torch.cuda.memory_allocated() - before < stats.kv_cache_bytes + (64 << 20)


def test_the_pool_grows_in_the_middle_of_a_call():
    model = hf_paged.enable(on_gpu(), strict=True)
    assert_native_parity(model, **cuda(batch([100] * 12)), max_new_tokens=40)
    stats = hf_paged.get_engine(model).stats()
    assert stats.num_pool_growths > 0
    assert stats.num_preemptions == 0


def test_a_generator_takes_the_memory_budget_after_a_real_step():
    total = torch.cuda.get_device_properties(0).total_memory
    with PagedGenerator(on_gpu(), gpu_memory_utilization=0.9, max_model_len=512, max_num_seqs=64) as generator:
        prompts = batch([20, 7])["input_ids"].tolist()
        completions = generator.generate(prompts, max_new_tokens=5)
        assert [len(c.token_ids) for c in completions] == [5, 5]
        stats = generator.engine.stats()
        assert stats.num_pool_growths == 0
        assert stats.num_blocks == min(stats.num_blocks, 64 * 512 // 16 + 1)
        assert torch.cuda.memory_reserved() < 0.9 * total  # of this process: others may use the GPU, too


def test_streaming_from_another_thread():
    model = on_gpu()
    inputs = cuda(batch([33, 7]))
    expected = stock_generate(model, **inputs, max_new_tokens=20)
    hf_paged.enable(model, strict=True)
    columns, results = [], []

    class Streamer:
        def put(self, value):
            columns.append(value)

        def end(self):
            columns.append(None)

    def work():
        results.append(model.generate(**inputs, max_new_tokens=20, streamer=Streamer()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert_same_tensor(results[0], expected)
    assert columns[-1] is None
    assert torch.equal(torch.stack(columns[1:-1], dim=1), expected[:, 33:].cpu())


def test_two_threads_on_one_model():
    model = on_gpu()
    batches = [cuda(batch([30, 17, 25], seed=i)) for i in range(2)]
    expected = [stock_generate(model, **b, max_new_tokens=30) for b in batches]
    hf_paged.enable(model, strict=True)
    results = [None, None]

    def work(i):
        results[i] = model.generate(**batches[i], max_new_tokens=30)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    run_threads(threads)
    for actual, wanted in zip(results, expected, strict=True):
        assert_same_tensor(actual, wanted)
    assert_idle(model)


def test_a_side_stream_sees_the_tensors_made_on_it():
    """Inputs written on the caller's stream are ready, and its output is, without a synchronisation by the caller."""
    model = hf_paged.enable(on_gpu(), strict=True)
    inputs = cuda(batch([20, 7]))
    expected = stock_generate(model, **inputs, max_new_tokens=8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-3
        late = {name: (tensor + 0 * busy[0, 0].nan_to_num().long()) for name, tensor in inputs.items()}
        actual = model.generate(**late, max_new_tokens=8)
        assert_same_tensor(actual, expected)
        assert torch.cuda.current_stream() == stream


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_a_model_on_a_gpu_that_is_not_the_current_one():
    model = tiny_model(**SHAPE).to("cuda:1")
    inputs = {name: tensor.to("cuda:1") for name, tensor in batch([20, 7]).items()}
    with torch.cuda.device(1):
        expected = stock_generate(model, **inputs, max_new_tokens=8)
    hf_paged.enable(model, strict=True)
    assert torch.cuda.current_device() == 0
    assert_native_parity(model, expected, **inputs, max_new_tokens=8)
    assert torch.cuda.current_device() == 0


def test_a_model_that_moves_to_the_gpu_while_enabled():
    model = hf_paged.enable(tiny_model(**SHAPE), strict=True)
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)
    model.cuda()
    assert_native_parity(model, **cuda(batch([20, 7])), max_new_tokens=5)
    model.cpu()
    assert_native_parity(model, **batch([20, 7]), max_new_tokens=5)


def test_an_interrupt_leaves_a_working_engine():
    model = hf_paged.enable(on_gpu(), strict=True, overlap=True)
    inputs = cuda(batch([30, 17]))

    class Raising:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, max_new_tokens=20, streamer=Raising())
    assert_idle(model)
    assert_native_parity(model, **inputs, max_new_tokens=20)
