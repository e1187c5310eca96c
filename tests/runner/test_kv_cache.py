"""The KV pool in reserved addresses, over a fake driver: growth and release keep graphs, tokens and accounts right."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from fake_driver import FakeDriver, lent_driver
from hypothesis import given, settings
from hypothesis import strategies as st
from on_gpu import cuda
from support import assert_idle, assert_native_parity, batch, random_prompts, run_out, stock_generate, tiny_model
from threads import run_threads
from transformers import GenerationConfig

import hf_paged
from hf_paged.device import virtual_memory
from hf_paged.device.virtual_memory import DriverError, VirtualMemory, find_driver
from hf_paged.models import KVSpec
from hf_paged.models.base import PoolShape
from hf_paged.runner.kv_cache import KVCache, blocks_within, filled

SPEC = KVSpec(2, 6, 3, 16, torch.float32, torch.float32, torch.device("cpu"))
MIB = 1 << 20


driver = pytest.fixture(lent_driver, name="driver")  # every pool on the CPU lies in its reserved addresses


def numbers(model):
    stats = hf_paged.get_engine(model).stats()
    return stats.num_graphs_captured, stats.num_graphs_dropped


# -- the cache alone ------------------------------------------


def test_blocks_stay_where_they_are_when_the_pool_grows(driver):
    cache = KVCache(SPEC, 16, 3, max_blocks=100)
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert {tensor.shape for tensor in tensors} == {(3, 16, 3, 16)} and {t.dtype for t in tensors} == {torch.float32}
    for i, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + i * 1e5)
    copies, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    cache.grow(40)
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert [tensor.data_ptr() for tensor in tensors] == places and cache.version == 0
    assert {len(tensor) for tensor in tensors} == {40} == {cache.num_blocks}
    assert all(torch.equal(tensor[:3], copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert cache.nbytes == driver.in_use >= 40 * SPEC.block_bytes(16)
    del tensors, tensor
    cache.release()
    assert (cache.layers, cache.num_blocks, cache.nbytes, driver.in_use) == ([], 0, 0, 0)
    cache.grow(7)
    assert [tensor.data_ptr() for pair in cache.layers for tensor in pair] == places and cache.version == 0


def test_a_pool_that_is_garbage_gives_everything_back(driver):
    cache = KVCache(SPEC, 16, 3, max_blocks=100)
    driver.start_work()
    del cache
    gc.collect()
    assert driver.is_empty() and driver.num_finished == 1


def test_without_reserved_addresses_the_tensors_are_torchs_and_move(monkeypatch):
    monkeypatch.setattr(virtual_memory, "find_driver", lambda device: None)
    cache = KVCache(SPEC, 16, 3, max_blocks=100)
    cache.layers[1][0].fill_(3)
    assert not cache.keeps_addresses and cache.nbytes == 3 * SPEC.block_bytes(16)
    cache.grow(5)
    assert cache.version == 1 and bool((cache.layers[1][0][:3] == 3).all())
    assert filled(SPEC, 16, 7) == 7 and blocks_within(SPEC, 16, 7 * SPEC.block_bytes(16) + 5) == 7


def test_pools_of_unlike_sizes_grow_and_keep_their_content(driver):
    """They lie in torch's memory, and keys may be wider than values."""
    shapes = PoolShape(2, 24, 16), PoolShape(4, 8, 8)
    spec = SPEC._replace(pools=shapes)
    cache = KVCache(spec, 16, 3, max_blocks=100)
    for _ in range(2):
        sizes = [(tensor.shape[2], tensor.shape[3]) for pair in cache.layers for tensor in pair]
        assert sizes == [(2, 24), (2, 16), (4, 8), (4, 8)]
        nbytes = sum(tensor.nbytes for pair in cache.layers for tensor in pair)
        assert nbytes == cache.nbytes == cache.num_blocks * spec.block_bytes(16)
        cache.layers[0][1][:3].fill_(3)
        cache.grow(5)
        assert bool((cache.layers[0][1][:3] == 3).all())
    assert not cache.keeps_addresses and driver.in_use == 0
    assert filled(spec, 16, 7) == 7 and blocks_within(spec, 16, 7 * spec.block_bytes(16) + 5) == 7


@pytest.mark.parametrize("name", ["reserve", "create", "map", "allow"])
def test_a_driver_that_refuses_leads_to_torchs_memory(driver, name, caplog):
    def script(called):
        if called == name:
            raise DriverError(f"{name} is not to be had")

    driver.script = script
    cache = KVCache(SPEC, 16, 3, max_blocks=100)
    assert not cache.keeps_addresses and cache.num_blocks == 3 and len(cache.layers) == 2
    assert f"{name} is not to be had" in caplog.text
    assert driver.is_empty()


def test_a_pool_that_finds_too_little_memory_leaves_nothing(driver):
    driver.free = 3 * driver.granularity
    with pytest.raises(torch.OutOfMemoryError):
        KVCache(SPEC, 16, 3, max_blocks=100)
    gc.collect()
    assert driver.is_empty() and driver.free == 3 * driver.granularity


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 256), st.sampled_from([16, 32, 1024]),
       st.sampled_from([1, 4096, 2 << 20]), st.integers(0, 1 << 40))
def test_blocks_are_counted_in_whole_pieces_of_memory(layers, heads, head_dim, block_size, unit, nbytes):
    """A budget is not exceeded by rounding up, and `filled` is the most that fits into what is mapped anyway."""
    spec = KVSpec(layers, heads, heads, head_dim, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    one = block_size * heads * head_dim * 2

    def mapped(num_blocks):
        return 2 * layers * -(-num_blocks * one // unit) * unit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_memory, "find_driver", lambda device: FakeDriver(granularity=unit))
        most = blocks_within(spec, block_size, nbytes)
        assert mapped(most) <= nbytes < mapped(most + 1)
        count = most + 1
        assert filled(spec, block_size, count) >= count
        assert mapped(filled(spec, block_size, count)) == mapped(count) < mapped(filled(spec, block_size, count) + 1)


# -- engines over it ------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """Steps as graphs that run uncaptured."""
    from runner.test_graphs import uncaptured

    return uncaptured(monkeypatch)


def test_growth_in_the_middle_of_a_call_drops_no_graph(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **batch([100] * 12), max_new_tokens=40)
    stats = hf_paged.get_engine(model).stats()
    assert stats.num_pool_growths > 0 and stats.num_preemptions == 0
    assert stats.num_graphs_captured > 0 and stats.num_graphs_dropped == 0
    assert stats.kv_cache_bytes == driver.in_use
    hf_paged.disable(model)
    assert driver.is_empty()


def test_graphs_that_hold_the_pools_size_go_when_it_grows_and_not_when_it_returns(driver, steps, monkeypatch):
    monkeypatch.setattr("runner.test_graphs.PlannedTorch.knows_pool_size", True)
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    before = numbers(model)
    hf_paged.get_engine(model).release_memory()
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    assert numbers(model) == before and before[1] == 0
    assert_native_parity(model, **batch([100] * 12), max_new_tokens=40)
    assert numbers(model)[1] >= before[0]
    hf_paged.disable(model)


@pytest.mark.parametrize("fixed", [False, True])
def test_release_gives_the_memory_back_and_the_next_call_captures_nothing(driver, steps, fixed):
    model = hf_paged.enable(tiny_model(), strict=True, **({"num_blocks": 300} if fixed else {}))
    engine, inputs = hf_paged.get_engine(model), batch([70, 40])
    expected = assert_native_parity(model, **inputs, max_new_tokens=9)
    assert_native_parity(model, expected, **inputs, max_new_tokens=9)
    for _ in range(2):  # the third use of a prompt's shape is captured
        engine.release_memory()
        assert_native_parity(model, expected, **inputs, max_new_tokens=9)
    before, held, hits = numbers(model), driver.in_use, engine.stats().prefix_cache_hits
    blocks = engine.stats().num_blocks
    assert before[0] > 0 and hits > 0
    scheduler = engine._core.scheduler
    for _ in range(3):
        driver.start_work()
        engine.release_memory()
        stats = engine.stats()
        assert driver.in_use == 0 == stats.kv_cache_bytes == stats.num_blocks == stats.num_free_blocks
        assert_native_parity(model, expected, **inputs, max_new_tokens=9)
        assert engine.stats().prefix_cache_hits == hits, "what was cached is gone with the memory"
        assert numbers(model) == before and driver.in_use == held and engine.stats().num_blocks == blocks
        assert engine._core.scheduler is scheduler, "its blocks take longer to make than the memory to map"
        assert_idle(model)
    engine._core._guard._checksum._chunks = table = torch.zeros(1)  # there is one on a GPU
    engine.release_memory()
    engine.release_memory()
    assert engine._core._guard._checksum._chunks is table
    engine.release_memory(graphs=True)
    assert driver.is_empty() and engine._core._guard._checksum._chunks is None
    assert_native_parity(model, expected, **inputs, max_new_tokens=9)
    hf_paged.disable(model)
    assert driver.is_empty()


def test_a_generator_takes_its_memory_again(driver, steps):
    prompts = random_prompts([40, 17])
    options = {"max_new_tokens": 5, "do_sample": False}
    with hf_paged.PagedGenerator(tiny_model(), max_num_seqs=4, max_model_len=200) as generator:
        expected = [c.token_ids for c in generator.generate(prompts, **options)]
        before, held = generator.engine.stats(), driver.in_use
        generator.engine.release_memory()
        assert driver.in_use == 0
        assert [c.token_ids for c in generator.generate(prompts, **options)] == expected
        stats = generator.engine.stats()
        assert (stats.num_graphs_captured, stats.num_blocks) == (before.num_graphs_captured, before.num_blocks)
        assert driver.in_use == held
    assert driver.is_empty()


def test_weights_that_changed_after_the_release_are_the_ones_that_count(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True)
    engine, inputs = hf_paged.get_engine(model), batch([40, 33])
    first = assert_native_parity(model, **inputs, max_new_tokens=8)
    engine.release_memory()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    before = numbers(model)
    second = assert_native_parity(model, **inputs, max_new_tokens=8)
    assert not torch.equal(first, second) and numbers(model) == before
    engine.release_memory()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert_native_parity(model, second, **inputs, max_new_tokens=8)
    assert numbers(model)[1] > before[1], "graphs that read other memory are gone"
    hf_paged.disable(model)


def test_nothing_holds_weights_that_leave_after_the_release(driver, steps):
    """A trainer that offloads the model between rollouts."""
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    hf_paged.get_engine(model).release_memory()
    graphs = hf_paged.get_engine(model)._core.pool.runner.graphs
    assert not graphs._held and graphs._captured
    assert not hf_paged.get_engine(model)._executor._linears._held
    hf_paged.disable(model)


def test_a_model_that_became_another_makes_another_pool(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    hf_paged.get_engine(model).release_memory()
    model.to(torch.bfloat16)
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=3)
    assert len(driver.reserved) == 1
    hf_paged.disable(model)


def test_where_others_took_the_memory_a_growing_pool_starts_small_again(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, **batch([100] * 12), max_new_tokens=40)
    held, before, runner = driver.in_use, numbers(model), engine._core.pool.runner
    engine.release_memory()
    free, driver.free = driver.free, held - driver.granularity
    assert_native_parity(model, **batch([40, 33]), max_new_tokens=8)
    assert driver.in_use < held and numbers(model)[1] == before[1] == 0 and engine._core.pool.runner is runner
    driver.free = free
    assert_native_parity(model, **batch([100] * 12), max_new_tokens=40)
    hf_paged.disable(model)


def test_a_fixed_pool_that_finds_no_room_says_so_and_can_be_tried_again(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True, num_blocks=300)
    inputs, engine = batch([40, 33]), hf_paged.get_engine(model)
    expected = assert_native_parity(model, **inputs, max_new_tokens=8)
    engine.release_memory()
    before, (free, driver.free) = numbers(model), (driver.free, 0)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(**inputs, max_new_tokens=8)
    assert driver.in_use == 0
    driver.free = free
    assert_native_parity(model, expected, **inputs, max_new_tokens=8)
    assert numbers(model) == before
    hf_paged.disable(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finish", "unmap", "release", "create", "map", "allow"])
def test_a_driver_that_refuses_once_costs_graphs_and_no_tokens(driver, steps, name):
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs, engine = batch([40, 33]), hf_paged.get_engine(model)
    expected = assert_native_parity(model, **inputs, max_new_tokens=8)
    left = [2]

    def script(called):
        left[0] -= called == name
        if called == name and left[0] == 0:
            raise DriverError(f"{name} fails")

    driver.script = script
    for _ in range(3):
        engine.release_memory()
        assert_native_parity(model, expected, **inputs, max_new_tokens=8)
    assert left[0] <= 0
    engine.release_memory(graphs=True)
    hf_paged.disable(model)


def test_a_release_that_is_interrupted_is_finished_by_the_next(driver, steps):
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs, engine = batch([40, 33]), hf_paged.get_engine(model)
    expected = assert_native_parity(model, **inputs, max_new_tokens=8)
    for name in ("finish", "unmap", "release"):
        def script(called, name=name):
            if called == name:
                raise KeyboardInterrupt

        driver.script = script
        with pytest.raises(KeyboardInterrupt):
            engine.release_memory()
        driver.script = lambda name: None
        if name == "release":
            pieces = [p for pieces in engine._core.pool.runner.cache._memory._pieces for p in pieces]
            for lost in set(driver.handles) - {piece.handle for piece in pieces}:
                driver.release(lost)  # which the interrupt came right before
        assert_native_parity(model, expected, **inputs, max_new_tokens=8)
    hf_paged.disable(model)


def test_rows_in_lockstep_find_the_memory_again(driver, steps):
    model, inputs = tiny_model(), batch([40, 33])
    expected = stock_generate(model, **inputs, max_new_tokens=8, num_beams=3, eos_token_id=None)
    hf_paged.enable(model, strict=True)
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, num_beams=3, eos_token_id=None), expected)
        hf_paged.get_engine(model).release_memory()
        assert driver.in_use == 0
    hf_paged.disable(model)


def test_copies_of_weights_go_and_come_back_to_the_same_graphs(driver, steps):
    """A trainer's fp32 weights under bf16 autocast: neither pool nor copies stay, and nothing is captured anew."""
    model, inputs = tiny_model(), batch([40, 33])
    hf_paged.enable(model, strict=True)
    engine, before = hf_paged.get_engine(model), None
    with torch.autocast("cpu", torch.bfloat16):
        for call in range(5):
            assert_native_parity(model, **inputs, max_new_tokens=8)
            assert engine.stats().shadow_bytes > 0
            before = numbers(model) if call < 3 else before  # the third use of a prompt's shape is captured
            assert numbers(model) == before and before[1] == 0
            driver.start_work()
            engine.release_memory()
            assert engine.stats().shadow_bytes == 0 == driver.in_use
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    assert_native_parity(model, **inputs, max_new_tokens=8)
    hf_paged.disable(model)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.one_of(
    st.tuples(st.just("call"), st.integers(1, 150), st.integers(1, 12)),
    st.tuples(st.just("release"), st.booleans(), st.just(0)),
    st.tuples(st.just("take"), st.integers(0, 64), st.just(0)),
), min_size=2, max_size=8))
def test_any_order_of_calls_and_releases_gives_stocks_tokens(actions):
    """Others take and give back memory meanwhile; the pool never holds more than its account says."""
    model, driver = tiny_model(), FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_memory, "find_driver", lambda device: driver)
        hf_paged.enable(model, max_num_seqs=4, max_num_batched_tokens=64)
        engine, taken = hf_paged.get_engine(model), 0
        for action, size, rows in actions:
            if action == "call":
                prompts = random_prompts([size, *range(1, rows)], seed=size)
                engine_tokens = _greedy(engine, prompts)
                expected = [stock_generate(model, input_ids=torch.tensor([p]), max_new_tokens=4, eos_token_id=None,
                                           do_sample=False)[0, len(p):].tolist() for p in prompts]
                assert engine_tokens == expected
            elif action == "release":
                engine.release_memory(graphs=size)
                assert driver.in_use == 0
            else:
                driver.free, taken = driver.free + taken - size * MIB, size * MIB
            assert engine.stats().kv_cache_bytes == driver.in_use
        hf_paged.disable(model)
    assert driver.is_empty()


def _greedy(engine, prompts):
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None)
    ids, found = [engine.add_request(prompt, config) for prompt in prompts], {}
    found |= {out.request_id: out.completion.token_ids for out in run_out(engine) if out.completion}
    return [found[request_id] for request_id in ids]


# -- on a GPU ------------------------------------------

SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128}
gpu = pytest.mark.gpu


@pytest.fixture
def alone():
    """For what reads how much memory of the device is free."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the GPU meanwhile: run it without -n")


@pytest.fixture
def needs_driver():
    if find_driver(torch.device("cuda", 0)) is None:
        pytest.skip("this GPU, or this build of torch, has no virtual memory management")


def taken():
    """Bytes of the device that somebody uses, and torch does not cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@gpu
@pytest.mark.usefixtures("needs_driver")
def test_gpu_growth_keeps_graphs_and_content():
    model = hf_paged.enable(tiny_model(**SHAPE).cuda(), strict=True)
    inputs = cuda(batch([40, 33]))
    assert_native_parity(model, **inputs, max_new_tokens=30)
    engine = hf_paged.get_engine(model)
    places = [t.data_ptr() for pair in engine._core.pool.runner.cache.layers for t in pair]
    assert_native_parity(model, **cuda(batch([150] * 24)), max_new_tokens=60)
    stats = engine.stats()
    assert stats.num_pool_growths > 0 and stats.num_preemptions == 0 and stats.num_graphs_dropped == 0
    assert [t.data_ptr() for pair in engine._core.pool.runner.cache.layers for t in pair] == places
    assert_native_parity(model, **inputs, max_new_tokens=30)
    assert engine.stats().prefix_cache_hits >= 32 + 32, "what was cached before the growth is still there"
    hf_paged.disable(model)


@gpu
@pytest.mark.usefixtures("needs_driver", "alone")
def test_gpu_memory_goes_in_a_training_step_and_comes_back_to_the_same_graphs():
    model = tiny_model(**SHAPE).cuda()
    inputs = cuda(batch([40, 33]))
    model.generate(**inputs, max_new_tokens=3)
    before = taken()
    hf_paged.enable(model, strict=True, num_blocks=40_000)
    engine = hf_paged.get_engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = None
    for _ in range(3):
        assert_native_parity(model, **inputs, max_new_tokens=9)
        assert taken() - before >= engine.stats().kv_cache_bytes == 4 * -(-40_000 * 8192 // (2 * MIB)) * 2 * MIB
        engine.release_memory()
        assert engine.stats().kv_cache_bytes == 0
        # What is left: the graphs' working memory, tables of requests and positions, and the cuBLAS workspaces.
        assert taken() - before <= 160 * MIB
        graphs = graphs or numbers(model)
        assert numbers(model) == graphs, "captured anew"
        ids = inputs["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hf_paged.disable(model)


@gpu
@pytest.mark.usefixtures("needs_driver", "alone")
@pytest.mark.parametrize("how", ["disable", "release", "garbage"])
def test_gpu_nothing_is_left_of_an_engine(how):
    """Streams and handles of libraries stay in a process: a first engine makes them."""
    inputs = cuda(batch([40, 33]))

    def use(how):
        model = hf_paged.enable(tiny_model(**SHAPE).cuda(), strict=True)
        weights = sum(p.nbytes for p in model.parameters())
        model.generate(**inputs, max_new_tokens=9)
        if how == "disable":
            hf_paged.disable(model)
        elif how == "release":
            hf_paged.get_engine(model).release_memory(graphs=True)
        return model if how != "garbage" else weights

    use("garbage")
    gc.collect()
    before = taken()
    kept = use(how)
    weights = 0 if how == "garbage" else 4 * MIB  # two segments of torch's allocator
    assert taken() - before <= weights + MIB
    del kept


@gpu
@pytest.mark.usefixtures("needs_driver")
def test_gpu_an_engine_that_dies_in_a_capture_waits_with_its_memory():
    model = hf_paged.enable(tiny_model(**SHAPE).cuda(), strict=True, enforce_eager=True)
    model.generate(**cuda(batch([40, 33])), max_new_tokens=9)
    memory: VirtualMemory = hf_paged.get_engine(model)._core.pool.runner.cache._memory
    x, graph, stream = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        x.add_(1)
        del model
        gc.collect()
        x.add_(1)
    graph.replay()
    assert x.tolist() == [3.0] * 8
    KVCache(SPEC._replace(device=torch.device("cuda", 0)), 16, 3, max_blocks=10).close()
    assert memory.nbytes == 0


@gpu
@pytest.mark.usefixtures("needs_driver")
def test_gpu_two_engines_grow_and_release_beside_each_other():
    models = [tiny_model(i, **SHAPE).cuda() for i in range(2)]
    inputs = [cuda(batch([100] * 8, seed=i)) for i in range(2)]
    expected = [stock_generate(m, **i, max_new_tokens=30) for m, i in zip(models, inputs, strict=True)]
    results: list = [[], []]

    def work(i):
        hf_paged.enable(models[i], strict=True)
        for _ in range(4):
            results[i].append(models[i].generate(**inputs[i], max_new_tokens=30))
            hf_paged.get_engine(models[i]).release_memory()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    run_threads(threads, 240)
    for i in range(2):
        assert len(results[i]) == 4 and all(torch.equal(result, expected[i]) for result in results[i])
        assert hf_paged.get_engine(models[i]).stats().num_graphs_dropped == 0
        hf_paged.disable(models[i])
