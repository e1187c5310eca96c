"""Memory of an engine on its device: how many KV blocks fit, and the pool's creation, growth and release.

The number of blocks comes from a real warm-up step on an owned device, and from arithmetic on a shared one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hf_paged.config import PagedConfig
from hf_paged.device.cuda import free_memory
from hf_paged.device.virtual_memory import DriverError
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import KVSpec, ModelExecutor
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.kv_cache import KVReads, blocks_within, filled
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.recurrent.recurrent_runner import RecurrentRunner
from hf_paged.runner.recurrent.saved_states import SNAPSHOTS_SHARE, most_snapshots
from hf_paged.runner.recurrent.state_pool import config_for_states, most_sequences
from hf_paged.runner.request_state import aligned, table_columns
from hf_paged.runner.warm_up import WarmUp
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.table import Drawing
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

# The limit on a CPU, which has no memory budget; the pool takes it page by page.
CPU_KV_CACHE_BYTES = 1 << 30
NO_PAGES = 1 << 14  # bytes that a block counts for where no layer has pages
# Graphs keep their memory beside that of eager steps, and more if small ones were captured first.
_STEPS_IN_MEMORY = {False: 3, True: 1}
FIRST_POOL_BLOCKS = 64  # with 8 KV heads of 128, each tensor is then one 2 MiB page
POOL_GROWTH = 1.5


def shared_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int, *,
                      held_blocks: int, held_tables: int = 0, held_states: int = 0) -> int:
    """Return the maximum number of blocks of an enabled model's pool that has `held_blocks` now, and tables and states
    of `held_tables` and `held_states` bytes; allocates nothing.

    On CUDA: total * gpu_memory_utilization - used memory besides the pool - an upper bound of one step. Memory that
    torch has cached but does not use counts as free; future copies of weights and growth of tables count as used. On a
    CPU: `CPU_KV_CACHE_BYTES`.
    """
    states = _states_bytes(executor, spec, config)
    if spec.device.type != "cuda":
        return _cpu_num_blocks(spec, config, max_model_len, states)
    free, total = free_memory(spec.device), torch.cuda.mem_get_info(spec.device)[1]
    free -= executor.bytes_to_come() + (0 if executor.replica is None else executor.replica.bytes_to_come)
    step_bytes = executor.step_bytes(config.max_num_batched_tokens, config.max_num_seqs)
    # Which count as used twice otherwise.
    free += min(held_tables, table_bytes(config, max_model_len)) + min(held_states, states)
    extra = _blocks_left(spec, config, max_model_len, free, total, step_bytes, states)
    return max(2, min(held_blocks + extra, _most_useful(config, max_model_len)))


def config_for(config: PagedConfig, executor: ModelExecutor) -> PagedConfig:
    """Return the config under which an executor's models run: with states, as `config_for_states` says."""
    if not executor.has_states:
        return config
    spec = executor.kv_spec()
    return config_for_states(config, spec, _budget(executor, config, spec.device))


def most_rows(executor: ModelExecutor, config: PagedConfig) -> int | None:
    """Return how many rows of an executor's models have states at once; None: any number."""
    if not executor.has_states:
        return None
    spec = executor.kv_spec()
    return most_sequences(spec, _budget(executor, config, spec.device))


def _budget(executor: ModelExecutor, config: PagedConfig, device: torch.device) -> int:
    """Return the bytes that pages, states and snapshots of a model with states may take together on a device."""
    if device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    weights = sum(tensor.nbytes for tensor in (*executor.model.parameters(), *executor.model.buffers()))
    return max(0, int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization) - weights)


def _states_bytes(executor: ModelExecutor, spec: KVSpec, config: PagedConfig) -> int:
    """Return the bytes of all states of a runner, and of as many snapshots as may be kept."""
    if not spec.states:
        return 0
    saved = int(_budget(executor, config, spec.device) * SNAPSHOTS_SHARE) if config.enable_prefix_caching else 0
    return (config.max_num_seqs + 1) * spec.state_bytes + saved


def runner_kind(executor: ModelExecutor, spec: KVSpec, config: PagedConfig) -> Callable[..., ModelRunner]:
    """Return the class of runners of an executor's models, or one with its number of snapshots."""
    if not spec.states:
        return ModelRunner
    most = most_snapshots(spec, config.block_size, _budget(executor, config, spec.device))
    return partial(RecurrentRunner, num_snapshots=most)


def most_blocks_ever(spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Return an upper bound of any pool's blocks on this device, however much memory becomes free."""
    most = _most_useful(config, max_model_len)
    if spec.device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(spec.device)[1] // (spec.block_bytes(config.block_size) or NO_PAGES))
    return max(2, most)


def owned_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Return the blocks of a `PagedGenerator`: total * gpu_memory_utilization - used - (peak - current) of the largest
    step - the tables of running requests.

    Raises:
        RuntimeError: If fewer than two blocks are left.
    """
    states = _states_bytes(executor, spec, config)
    if spec.device.type != "cuda":
        return _cpu_num_blocks(spec, config, max_model_len, states)
    step_bytes = _warm_up(executor, spec, config, max_model_len)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(spec.device)
    num_blocks = _blocks_left(spec, config, max_model_len, free, total, step_bytes, states)
    if num_blocks < 2:
        raise RuntimeError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: of {total / 2**30:.1f} GiB, {free / 2**30:.1f} "
            f"are free and a step takes {step_bytes / 2**30:.1f}; nothing is left for the KV pool"
        )
    return min(num_blocks, _most_useful(config, max_model_len))


def table_bytes(config: PagedConfig, max_model_len: int) -> int:
    """Return the maximum bytes of token history and block tables in `RequestState`."""
    columns = aligned(max_model_len) + table_columns(max_model_len, config.block_size)
    return (config.max_num_seqs + 1) * columns * torch.int32.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of a device, in bytes unless stated otherwise; None if it is not limited.

    Attributes:
        total, free: Memory of the device now.
        weights: Size of the loaded model.
        steps: Estimated working memory of steps and their graphs.
        kv_cache: Size of the pool.
        num_blocks, block_size: Number of blocks of the pool, and tokens per block.
        token: Size of one token's keys and values.
        max_model_len: Length of the longest sequence in tokens.
        num_longest: Number of sequences of that length that fit at once.
        fits: True if there are at least two blocks.
    """

    total: int | None
    free: int | None
    weights: int
    steps: int
    kv_cache: int
    num_blocks: int
    block_size: int
    token: int
    max_model_len: int
    num_longest: int
    fits: bool


def planned(executor: ModelExecutor, config: PagedConfig, device: torch.device, weights: int) -> MemoryPlan:
    """Return the plan of a `PagedGenerator` on ``device``, for a model of ``weights`` bytes that is not loaded yet.

    A step's bytes are estimated; `owned_num_blocks` measures them.
    """
    spec, longest = executor.kv_spec()._replace(device=device), executor.max_length(config.max_model_len)
    if spec.states:
        config = config_for_states(config, spec, _budget(executor, config, device))
    states = _states_bytes(executor, spec, config)
    step_bytes = executor.step_bytes(config.max_num_batched_tokens, config.max_num_seqs)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif free is None or total is None:
        num_blocks = _cpu_num_blocks(spec, config, longest, states)
    else:
        num_blocks = min(_blocks_left(spec, config, longest, free - weights, total, step_bytes, states),
                         _most_useful(config, longest))
    size, token = config.block_size, spec.block_bytes(config.block_size) // config.block_size
    return MemoryPlan(total, free, weights, step_bytes * _STEPS_IN_MEMORY[config.enforce_eager],
                      num_blocks * size * token, num_blocks, size, token, longest,
                      max((num_blocks - 1) // -(-longest // size), 0), num_blocks >= 2)


def _blocks_left(spec: KVSpec, config: PagedConfig, max_model_len: int, free: int, total: int,
                 step_bytes: int, states: int = 0) -> int:
    available = free - total * (1.0 - config.gpu_memory_utilization) - states
    available -= step_bytes * _STEPS_IN_MEMORY[config.enforce_eager] + table_bytes(config, max_model_len)
    return blocks_within(spec, config.block_size, int(available))


def rehearse(executor: ModelExecutor, config: PagedConfig, max_model_len: int) -> None:
    """Run the largest step as `owned_num_blocks` does, to compile its kernels; keeps no memory."""
    largest_step(executor, executor.kv_spec(), config, max_model_len)()
    executor.release()
    torch.cuda.empty_cache()


def _warm_up(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Run the largest step; returns its peak bytes beyond what stays allocated."""
    run = largest_step(executor, spec, config, max_model_len)
    torch.cuda.synchronize(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    before = torch.cuda.memory_allocated(spec.device)
    run()
    rows = executor.step_bytes(0, config.max_num_seqs) if executor.has_states else 0
    return torch.cuda.max_memory_allocated(spec.device) - before + rows


def largest_step(executor: ModelExecutor, spec: KVSpec, config: PagedConfig,
                  max_model_len: int) -> Callable[[], object]:
    """Return a function that runs the largest step on a temporary pool and waits for its end.

    Of a model with states whose prompts run one by one, it is one prompt.
    """
    prompts = 1 if executor.has_states and not executor.packs_prompts else config.max_num_seqs
    length = max(1, min(config.max_num_batched_tokens // prompts, max_model_len - 1))
    num_blocks = config.max_num_seqs * -(-(length + 1) // config.block_size) + 1
    scheduler = Scheduler(SchedulerConfig(
        block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=max_model_len,
        enable_prefix_caching=False,
    ))
    for i in range(prompts):
        scheduler.add(Sequence(f"warm-up-{i}", [0] * length, max_new_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    runner = runner_kind(executor, spec, config)(
        executor, spec, block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len, max_num_batched_tokens=config.max_num_batched_tokens,
        attention_backend=config.attention_backend)
    # All options of the sampler together, for the largest memory use.
    row = SlotRow.of(Drawing(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, min_p=0.05), max_length=length + 1)
    runner.prepare()
    launch = partial(runner.launch, plan, [row] * len(plan.admitted))
    if config.enforce_eager:
        return lambda: launch().wait()
    steps = PaddedSteps(executor, runner.cache, runner.state, runner.attention, config.max_num_batched_tokens)
    later = dry_runs(steps, config.max_num_seqs, config.max_num_batched_tokens)
    return lambda: compiled_together(launch, later, may_break_off=executor.may_repeat).wait()


def _cpu_num_blocks(spec: KVSpec, config: PagedConfig, max_model_len: int, states: int) -> int:
    left = CPU_KV_CACHE_BYTES - states
    # Blocks of a model without attention hold nothing, but for their place in the scheduler.
    return max(2, min(left // (spec.block_bytes(config.block_size) or NO_PAGES), _most_useful(config, max_model_len)))


def _most_useful(config: PagedConfig, max_model_len: int) -> int:
    """Return the blocks of `max_num_seqs` sequences of full length, and the null block; more would stay free."""
    return config.max_num_seqs * -(-max_model_len // config.block_size) + 1


class DevicePool:
    """The runner and its KV pool: fixed in blocks, the whole memory budget (`owns_device`), or growing on demand."""

    def __init__(self, executor: ModelExecutor, config: PagedConfig, *, owns_device: bool) -> None:
        self._executor = executor
        self._config = config
        self._owns_device = owns_device
        self.warm_up = WarmUp(executor, config)
        self.runner: ModelRunner | None = None
        self.max_blocks = 0  # upper bound of the pool's size
        self.num_growths = 0
        self.reads = KVReads()
        self._released_blocks = 0  # size before `release`, restored afterwards

    @property
    def max_model_len(self) -> int:
        """Return the maximum number of tokens of a sequence, prompt and output."""
        return self._executor.max_length(self._config.max_model_len)

    @property
    def num_blocks(self) -> int:
        return self.runner.cache.num_blocks if self.runner else 0

    @property
    def nbytes(self) -> int:
        return self.runner.cache.nbytes if self.runner else 0

    @property
    def graph_counts(self) -> tuple[int, dict[str, int]]:
        """Return the number of CUDA graphs that the current runner captured, and those that it dropped by reason."""
        graphs = self.runner.graphs if self.runner else None
        return (graphs.num_captured, {**graphs.dropped_by}) if graphs else (0, {})

    @property
    def most_blocks(self) -> int:
        """Return `max_blocks`, or its value if the pool were built now; allocates nothing."""
        if self.num_blocks:
            return self.max_blocks
        if self._config.num_blocks is not None:
            return self._config.num_blocks
        tables, states = (0, 0) if self.runner is None else (self.runner.state.nbytes, self.runner.cache.states_nbytes)
        return shared_num_blocks(self._executor, self._executor.kv_spec(), self._config, self.max_model_len,
                                 held_blocks=0, held_tables=tables, held_states=states)

    def build(self) -> ModelRunner:
        """Allocate the pool or restore released memory; raises RuntimeError if the device cannot hold two blocks."""
        if self.runner is not None and self._has_returned():
            return self.runner
        spec, config = self._executor.kv_spec(), self._config
        smallest = self._executor.group.smallest  # all ranks need the same size, with different amounts of free memory
        if config.num_blocks is not None:
            num_blocks = self.max_blocks = config.num_blocks
        elif self._owns_device:
            num_blocks = owned_num_blocks(self._executor, spec, config, self.max_model_len)
            num_blocks = self.max_blocks = smallest(num_blocks)
        else:
            self.max_blocks = smallest(self.most_blocks)
            num_blocks = min(FIRST_POOL_BLOCKS, self.max_blocks)
        most = num_blocks if self._is_fixed or self._owns_device else most_blocks_ever(spec, config, self.max_model_len)
        self.runner = runner_kind(self._executor, spec, config)(
            self._executor, spec, block_size=config.block_size, num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs, max_model_len=self.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens, attention_backend=config.attention_backend,
            use_graphs=not config.enforce_eager,
            # Unmapping waits for the device, which never ends if a lost rank leaves a collective waiting.
            max_blocks=None if self._executor.group.is_parallel else most, reads=self.reads,
        )
        self.warm_up.get_ready(self.runner)
        return self.runner

    def rehearse(self) -> None:
        """Compile the kernels that `build` runs, if any; allocates nothing permanent."""
        on_gpu = self._executor.kv_spec().device.type == "cuda"
        if on_gpu and self._owns_device and self._config.num_blocks is None:
            rehearse(self._executor, self._config, self.max_model_len)

    def grow(self, missing: int) -> int:
        """Enlarge the pool for `missing` more blocks, within the memory budget; returns its size in blocks."""
        assert self.runner is not None
        cache = self.runner.cache
        if self._is_fixed or self._owns_device:
            return cache.num_blocks
        most = shared_num_blocks(self._executor, cache.spec, self._config, self.max_model_len,
                                 held_blocks=cache.num_blocks, held_tables=self.runner.state.nbytes,
                                 held_states=cache.states_nbytes)
        self.max_blocks = self._executor.group.smallest(most)
        wanted = max(cache.num_blocks + missing, int(cache.num_blocks * POOL_GROWTH))
        wanted = min(filled(cache.spec, cache.block_size, wanted), self.max_blocks)
        if wanted > cache.num_blocks:
            try:
                cache.grow(wanted)
            except (torch.OutOfMemoryError, DriverError):  # the budget was estimated; the scheduler preempts instead
                if self._executor.group.is_parallel:  # the pools of other ranks have grown, sizes would differ
                    raise
                return cache.num_blocks
            self.num_growths += 1
        return cache.num_blocks

    def moved(self) -> bool:
        """Return whether the model's device, dtype, shape or maximum length differs from the pool's."""
        made_for = self.runner and (self.runner.spec, self.runner.max_model_len)
        return self.runner is not None and made_for != (self._executor.kv_spec(), self.max_model_len)

    def release(self) -> None:
        """Free the pool's memory; keeps graphs if memory can return to the same addresses, else calls `drop`."""
        if self.runner is None or not self.runner.cache.keeps_addresses:
            self.drop()
            return
        self._released_blocks = self.num_blocks or self._released_blocks
        try:
            self.runner.release()
        except DriverError:
            self.drop()

    def _has_returned(self) -> bool:
        """Restore released memory to its former size, if possible; returns False if the pool must be built again."""
        assert self.runner is not None
        cache, sizes = self.runner.cache, [self._released_blocks]
        if cache.num_blocks:
            return True
        if not self._is_fixed and not self._owns_device:
            self.max_blocks = self.most_blocks
            sizes = [min(size, self.max_blocks) for size in (self._released_blocks, FIRST_POOL_BLOCKS)]
        for num_blocks in sizes:
            try:
                cache.grow(num_blocks)
            except torch.OutOfMemoryError:
                if self._is_fixed:
                    raise
            except DriverError:
                break
            else:
                return True
        self.drop()
        return False

    @property
    def _is_fixed(self) -> bool:
        return self._config.num_blocks is not None

    def drop(self) -> None:
        """Free all memory of the runner; merged parameters get memory of their own again."""
        if self.runner is not None:
            if self.runner.graphs is not None:
                self.runner.graphs.drop("pool freed")
            self.runner.cache.close()
        self.runner = None
        self._executor.release()
