"""Number of KV blocks that fit: from a real warm-up step on an owned device, by arithmetic on a shared one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from hf_paged.config import PagedConfig
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import KVSpec, ModelExecutor
from hf_paged.runner.kv_cache import blocks_within
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

# The limit on a CPU, which has no memory budget; the pool takes it page by page.
CPU_KV_CACHE_BYTES = 1 << 30
# Graphs keep their memory beside that of eager steps, and more if small ones were captured first.
_STEPS_IN_MEMORY = {False: 3, True: 1}


def shared_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int, *,
                      held_blocks: int) -> int:
    """Return the maximum number of blocks of an enabled model's pool that has `held_blocks` now; allocates nothing.

    On CUDA: total * gpu_memory_utilization - used memory besides the pool - an upper bound of one step. Memory that
    torch has cached but does not use counts as free; future copies of weights and growth of tables count as used. On a
    CPU: `CPU_KV_CACHE_BYTES`.
    """
    if spec.device.type != "cuda":
        return _cpu_num_blocks(spec, config, max_model_len)
    free, total = torch.cuda.mem_get_info(spec.device)
    free += torch.cuda.memory_reserved(spec.device) - torch.cuda.memory_allocated(spec.device)
    available = free - total * (1.0 - config.gpu_memory_utilization)
    step_bytes = executor.step_bytes(config.max_num_batched_tokens, config.max_num_seqs)
    available -= step_bytes * _STEPS_IN_MEMORY[config.enforce_eager] + executor.bytes_to_come()
    available -= 0 if executor.replica is None else executor.replica.bytes_to_come
    available -= table_bytes(config, max_model_len)
    extra = blocks_within(spec, config.block_size, int(available))
    return max(2, min(held_blocks + extra, _most_useful(config, max_model_len)))


def most_blocks_ever(spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Return an upper bound of any pool's blocks on this device, however much memory becomes free."""
    most = _most_useful(config, max_model_len)
    if spec.device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(spec.device)[1] // spec.block_bytes(config.block_size))
    return max(2, most)


def owned_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Return the blocks of a `PagedGenerator`: total * gpu_memory_utilization - used - (peak - current) of the largest
    step - the tables of running requests.

    Raises:
        RuntimeError: If fewer than two blocks are left.
    """
    if spec.device.type != "cuda":
        return _cpu_num_blocks(spec, config, max_model_len)
    step_bytes = _warm_up(executor, spec, config, max_model_len)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(spec.device)
    num_blocks = _blocks_left(spec, config, max_model_len, free, total, step_bytes)
    if num_blocks < 2:
        raise RuntimeError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: of {total / 2**30:.1f} GiB, {free / 2**30:.1f} "
            f"are free and a step takes {step_bytes / 2**30:.1f}; nothing is left for the KV pool"
        )
    return min(num_blocks, _most_useful(config, max_model_len))


def table_bytes(config: PagedConfig, max_model_len: int) -> int:
    """Return the maximum bytes of token history and block tables in `RequestState`."""
    columns = max_model_len + -(-max_model_len // config.block_size)
    return (config.max_num_seqs + 1) * columns * torch.int32.itemsize


class MemoryPlan(NamedTuple):
    """Planned memory use of a device, in bytes except for `num_blocks`; ``free`` and ``total`` are None for a CPU."""

    free: int | None
    total: int | None
    weights: int
    steps: int
    num_blocks: int


def planned(executor: ModelExecutor, config: PagedConfig, max_model_len: int, device: torch.device,
            weights: int) -> MemoryPlan:
    """Return the plan of a `PagedGenerator` on ``device``, for a model of ``weights`` bytes that is not loaded yet.

    A step's bytes are estimated; `owned_num_blocks` measures them. With fewer than two blocks the model does not fit.
    """
    spec = executor.kv_spec()._replace(device=device)
    steps = executor.step_bytes(config.max_num_batched_tokens, config.max_num_seqs)
    steps *= _STEPS_IN_MEMORY[config.enforce_eager]
    if device.type != "cuda":
        num_blocks = config.num_blocks or _cpu_num_blocks(spec, config, max_model_len)
        return MemoryPlan(None, None, weights, steps, num_blocks)
    free, total = torch.cuda.mem_get_info(device)
    if config.num_blocks is not None:
        return MemoryPlan(free, total, weights, steps, config.num_blocks)
    step_bytes = steps // _STEPS_IN_MEMORY[config.enforce_eager]
    num_blocks = _blocks_left(spec, config, max_model_len, free - weights, total, step_bytes)
    return MemoryPlan(free, total, weights, steps, min(num_blocks, _most_useful(config, max_model_len)))


def _blocks_left(spec: KVSpec, config: PagedConfig, max_model_len: int, free: int, total: int,
                 step_bytes: int) -> int:
    available = free - total * (1.0 - config.gpu_memory_utilization)
    available -= step_bytes * _STEPS_IN_MEMORY[config.enforce_eager] + table_bytes(config, max_model_len)
    return blocks_within(spec, config.block_size, int(available))


def rehearse(executor: ModelExecutor, config: PagedConfig, max_model_len: int) -> None:
    """Run the largest step as `owned_num_blocks` does, to compile its kernels; keeps no memory."""
    _largest_step(executor, executor.kv_spec(), config, max_model_len)()
    executor.release()
    torch.cuda.empty_cache()


def _warm_up(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Run the largest step; returns its peak bytes beyond what stays allocated."""
    run = _largest_step(executor, spec, config, max_model_len)
    torch.cuda.synchronize(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    before = torch.cuda.memory_allocated(spec.device)
    run()
    return torch.cuda.max_memory_allocated(spec.device) - before


def _largest_step(executor: ModelExecutor, spec: KVSpec, config: PagedConfig,
                  max_model_len: int) -> Callable[[], object]:
    """Return a function that runs the largest step on a temporary pool and waits for its end."""
    length = max(1, min(config.max_num_batched_tokens // config.max_num_seqs, max_model_len - 1))
    num_blocks = config.max_num_seqs * -(-(length + 1) // config.block_size) + 1
    scheduler = Scheduler(SchedulerConfig(
        block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=max_model_len,
        enable_prefix_caching=False,
    ))
    for i in range(config.max_num_seqs):
        scheduler.add(Sequence(f"warm-up-{i}", [0] * length, max_new_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    runner = ModelRunner(executor, spec, block_size=config.block_size, num_blocks=num_blocks,
                         max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
                         max_num_batched_tokens=config.max_num_batched_tokens,
                         attention_backend=config.attention_backend)
    # All options of the sampler together, for the largest memory use.
    parameters = SlotParameters(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, max_length=length + 1)
    runner.prepare()
    launch = partial(runner.launch, plan, [parameters] * len(plan.admitted))
    if executor.group.is_parallel or config.enforce_eager:
        return lambda: launch().wait()
    steps = PaddedSteps(executor, runner.cache, runner.state, runner.attention, config.max_num_batched_tokens)
    coming = steps.coming(config.max_num_seqs, config.max_num_batched_tokens)
    return lambda: compiled_together(launch, coming).wait()


def _cpu_num_blocks(spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    return max(2, min(CPU_KV_CACHE_BYTES // spec.block_bytes(config.block_size), _most_useful(config, max_model_len)))


def _most_useful(config: PagedConfig, max_model_len: int) -> int:
    """Return the blocks of `max_num_seqs` sequences of full length, and the null block; more would stay free."""
    return config.max_num_seqs * -(-max_model_len // config.block_size) + 1
