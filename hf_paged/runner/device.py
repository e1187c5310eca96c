"""Creation, growth and release of an engine's memory on the device."""

from __future__ import annotations

import torch

from hf_paged.config import PagedConfig
from hf_paged.device.cuda_driver import DriverError
from hf_paged.models import ModelExecutor
from hf_paged.runner.kv_cache import filled
from hf_paged.runner.kv_reads import KVReads
from hf_paged.runner.memory import most_blocks_ever, owned_num_blocks, rehearse, shared_num_blocks
from hf_paged.runner.model_runner import ModelRunner

FIRST_POOL_BLOCKS = 64  # with 8 KV heads of 128, each tensor is then one 2 MiB page
POOL_GROWTH = 1.5


class DevicePool:
    """The runner and its KV pool: fixed in blocks, the whole memory budget (`owns_device`), or growing on demand."""

    def __init__(self, executor: ModelExecutor, config: PagedConfig, *, owns_device: bool) -> None:
        self._executor = executor
        self._config = config
        self._owns_device = owns_device
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
    def graph_counts(self) -> tuple[int, int]:
        """Return the numbers of CUDA graphs that the current runner captured and dropped."""
        graphs = self.runner.graphs if self.runner else None
        return (graphs.num_captured, graphs.num_dropped) if graphs else (0, 0)

    @property
    def most_blocks(self) -> int:
        """Return `max_blocks`, or its value if the pool were built now; allocates nothing."""
        if self.num_blocks:
            return self.max_blocks
        if self._config.num_blocks is not None:
            return self._config.num_blocks
        return shared_num_blocks(self._executor, self._executor.kv_spec(), self._config, self.max_model_len,
                                 held_blocks=0)

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
        self.runner = ModelRunner(
            self._executor, spec, block_size=config.block_size, num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs, max_model_len=self.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens, attention_backend=config.attention_backend,
            use_graphs=not config.enforce_eager,
            # Unmapping waits for the device, which never ends if a lost rank leaves a collective waiting.
            max_blocks=None if self._executor.group.is_parallel else most, reads=self.reads,
        )
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
                                 held_blocks=cache.num_blocks)
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
                self.runner.graphs.drop()
            self.runner.cache.close()
        self.runner = None
        self._executor.release()
