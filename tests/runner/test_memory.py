"""A rehearsal of the largest step: by one of several ranks, before they have met; nothing of it stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_model

from hf_paged import PagedConfig
from hf_paged.engine import locked_core
from hf_paged.models import KVSpec, find_executor
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.loading import load
from hf_paged.runner import memory, model_runner
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.memory import DevicePool, rehearse, table_bytes
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.request_state import RequestState
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

pytestmark = pytest.mark.usefixtures("no_grad")
CONFIG = PagedConfig(max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=[96, 2600])
def path(request, tmp_path_factory):
    """Vocabularies of less than a group of the sampler a rank, and of more."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(vocab_size=request.param).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_a_rehearsal_runs_all_layers_and_changes_nothing(path, size):
    group, asked = ParallelGroup(size - 1, size, driven=size > 1), []
    model = load(path, group, device="cpu")
    places = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    executor = find_executor(model)(model)
    with group.alone(lambda: asked.append(1)):
        rehearse(executor, CONFIG, 100)
    # The embedding, two sums a layer, and tokens to agree on.
    assert len(asked) >= (2 * model.config.num_hidden_layers + 2 if size > 1 else 0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(places)  # merged weights have one
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, places[name][1])


def test_without_the_others_it_has_to_be_said_to_be_a_rehearsal(path):
    model = load(path, ParallelGroup(0, 2), device="cpu")
    with pytest.raises(RuntimeError, match="has not met the others"):
        rehearse(find_executor(model)(model), CONFIG, 100)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_of_ranks_is_looked_at_dry_and_never_broken_off(path, size, monkeypatch):
    """The largest one, and then one of each kind that runs without a graph."""
    made = []

    def compiled_together(run, later=(), *, may_break_off=True):
        made.append((getattr(run, "func", run).__name__, may_break_off))
        return run()

    monkeypatch.setattr(memory, "compiled_together", compiled_together)
    monkeypatch.setattr(model_runner, "compiled_together", compiled_together)
    group = ParallelGroup(0, size)
    model = load(path, group, device="cpu")
    executor = find_executor(model)(model)
    with group.alone(lambda: None):
        rehearse(executor, CONFIG, 100)
        assert made == [("launch", size == 1)]
        runner = ModelRunner(executor, executor.kv_spec(), block_size=16, num_blocks=40, max_num_seqs=4,
                             max_model_len=100, max_num_batched_tokens=64, attention_backend="auto")
        runner.prepare()
        runner._compiles = True
        scheduler = Scheduler(SchedulerConfig(block_size=16, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64,
                                              max_model_len=100))
        for name, length in {"one": 9, "two": 40}.items():
            scheduler.add(Sequence(name, [7] * length, max_new_tokens=4))
            for _ in range(2):
                plan = scheduler.schedule()
                runner.launch(plan, [SlotRow.of(max_length=60)] * len(plan.admitted))
                scheduler.commit(plan, np.full(len(plan.slots), 7))
    steps = made[1:]
    assert set(steps) == {("_eagerly", size == 1)}
    # Of two ranks: a prompt, a row, a prompt beside a row, and two rows.
    assert len(steps) == 4
    made.clear()
    with group.alone(lambda: None):
        plan = scheduler.schedule()
        runner.launch(plan, [])
    assert len(made) == (size == 1), "a kind whose kernels are there is not looked at again"


@pytest.mark.parametrize("field", [{"attention_backend": "flash_attn"}])
def test_a_config_that_does_not_suit_the_model_is_said_before_anything_runs(path, field):
    """As by the engine, which comes later than a rehearsal."""
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.*: expected"):
        locked_core.rehearse(load(path, ParallelGroup(0, 1), device="cpu"), PagedConfig(**field))


def test_the_pool_is_of_the_caches_dtype_and_not_of_the_weights():
    spec = KVSpec(2, 6, 3, 16, cache_dtype=torch.bfloat16, compute_dtype=torch.float32, device=torch.device("cpu"))
    cache = KVCache(spec, block_size=16, num_blocks=5)
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert cache.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_a_pool_on_a_cpu_compiles_nothing_beforehand(path, monkeypatch):
    monkeypatch.setattr("hf_paged.runner.memory.rehearse", lambda *args: pytest.fail("it runs a step"))
    model = load(path, ParallelGroup(0, 1), device="cpu")
    DevicePool(find_executor(model)(model), CONFIG, owns_device=True).rehearse()


@pytest.mark.parametrize("max_model_len", [512, 131_200])
def test_tables_of_the_longest_sequences_are_within_the_budget(max_model_len, monkeypatch):
    """They grow when the first long request comes, and the pool has taken all that is left by then."""
    total, step = 80 << 30, 1 << 30
    spec = KVSpec(36, 32, 8, 128, torch.bfloat16, torch.bfloat16, torch.device("cuda"))
    config = PagedConfig(gpu_memory_utilization=0.5, max_num_seqs=128)
    state = RequestState(config.max_num_seqs, max_model_len, config.block_size, torch.device("cpu"))
    state.admit([0], [[1]], [[1]], [SlotRow.of(max_length=max_model_len)])
    tables = state.tokens.nbytes + state.block_table.nbytes
    assert table_bytes(config, max_model_len) == tables
    pool = memory._blocks_left(spec, config, max_model_len, total, total, step) * spec.block_bytes(config.block_size)
    assert total // 2 - (64 << 20) < pool + 3 * step + tables <= total // 2  # whole pages of 36 layers
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    model = tiny_model()
    executor = find_executor(model)(model)
    monkeypatch.setattr(executor, "step_bytes", lambda *sizes: step)
    shared = memory.shared_num_blocks(executor, spec, config, max_model_len, held_blocks=0)
    if max_model_len > 512:  # else a few hundred blocks are the most useful
        assert shared * spec.block_bytes(config.block_size) == pool


@pytest.mark.gpu
def test_a_pool_on_a_gpu_gives_the_memory_of_its_rehearsal_back(path):
    model = load(path, ParallelGroup(0, 1), device="cuda")
    model.lm_head(model.model.embed_tokens.weight[:2])  # cuBLAS keeps a workspace from its first call on
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    ran = []
    model.model.norm.register_forward_hook(lambda *args: ran.append(1))
    pool = DevicePool(find_executor(model)(model), CONFIG, owns_device=True)
    pool.rehearse()
    assert torch.cuda.memory_allocated() <= before[0] + (1 << 20)
    assert torch.cuda.memory_reserved() <= before[1] + (64 << 20)
    assert pool.build().cache.num_blocks > 1
