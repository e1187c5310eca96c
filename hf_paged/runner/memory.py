"""How many KV blocks there is room for: by a real warm-up pass where the device is ours, by arithmetic where not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.config import PagedConfig
from hf_paged.models import KVSpec, ModelExecutor
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

# On a CPU there is no budget to read off the device: the pool may take this much, and takes it page by page.
CPU_KV_CACHE_BYTES = 1 << 30
# Graphs keep a step's memory besides what eager steps share, and more where small ones were captured first.
_STEPS_IN_MEMORY = {False: 3, True: 1}


def shared_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int, *,
                      held_blocks: int) -> int:
    """Most blocks that an enabled model's pool may have, of which it holds `held_blocks` now. Allocates nothing.

    On CUDA: total * gpu_memory_utilization - what is in use besides the pool - an upper bound of one step, where
    memory that torch has cached but does not use counts as free, and copies of weights that will be made do not. On a
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
    extra = max(0, int(available) // spec.block_bytes(config.block_size))
    return max(2, min(held_blocks + extra, _most_useful(config, max_model_len)))


def owned_num_blocks(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Blocks for a `PagedGenerator`: total * gpu_memory_utilization - in use - (peak - current) of the largest step.

    Raises:
        RuntimeError: not even two blocks are left.
    """
    if spec.device.type != "cuda":
        return _cpu_num_blocks(spec, config, max_model_len)
    step_bytes = _warm_up(executor, spec, config, max_model_len)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(spec.device)
    available = free - total * (1.0 - config.gpu_memory_utilization)
    available -= step_bytes * _STEPS_IN_MEMORY[config.enforce_eager]
    num_blocks = int(available) // spec.block_bytes(config.block_size)
    if num_blocks < 2:
        raise RuntimeError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: of {total / 2**30:.1f} GiB, {free / 2**30:.1f} "
            f"are free and a step takes {step_bytes / 2**30:.1f}; nothing is left for the KV pool"
        )
    return min(num_blocks, _most_useful(config, max_model_len))


def rehearse(executor: ModelExecutor, config: PagedConfig, max_model_len: int) -> None:
    """Run the largest step as `owned_num_blocks` does, for its kernels to be compiled, and keep nothing of it."""
    _largest_step(executor, executor.kv_spec(), config, max_model_len)()
    executor.release()
    torch.cuda.empty_cache()


def _warm_up(executor: ModelExecutor, spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    """Run the largest step; returns the bytes it took at its peak beyond what stays."""
    run = _largest_step(executor, spec, config, max_model_len)
    torch.cuda.synchronize(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    before = torch.cuda.memory_allocated(spec.device)
    run()
    return torch.cuda.max_memory_allocated(spec.device) - before


def _largest_step(executor: ModelExecutor, spec: KVSpec, config: PagedConfig,
                  max_model_len: int) -> Callable[[], object]:
    """What runs it on a throw-away pool and waits for its end."""
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
    # Every option of the sampler at once.
    parameters = SlotParameters(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, max_length=length + 1)
    runner.prepare()
    return lambda: runner.launch(plan, [parameters] * len(plan.admitted)).wait()


def _cpu_num_blocks(spec: KVSpec, config: PagedConfig, max_model_len: int) -> int:
    return max(2, min(CPU_KV_CACHE_BYTES // spec.block_bytes(config.block_size), _most_useful(config, max_model_len)))


def _most_useful(config: PagedConfig, max_model_len: int) -> int:
    """Blocks beyond which even `max_num_seqs` sequences of full length leave some free, and the null block."""
    return config.max_num_seqs * -(-max_model_len // config.block_size) + 1
