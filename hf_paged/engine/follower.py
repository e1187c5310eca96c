"""The job of the ranks that `PagedGenerator.from_pretrained` starts: load a shard, and follow rank 0's commands."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hf_paged.config import PagedConfig
from hf_paged.parallel.group import ParallelGroup, check_world, join
from hf_paged.parallel.launch import Workers, is_leading, launch
from hf_paged.parallel.worker import meanwhile

# Modules that import transformers, which takes seconds, are imported late: a worker connects to the others first.


@dataclass(frozen=True)
class Follower:
    """A job of `launch`. Arguments as of `PagedGenerator.from_pretrained`."""

    path: str
    dtype: str | torch.dtype
    device_type: str
    config: PagedConfig
    files: dict[str, Any] = field(default_factory=dict)

    def run(self, rank: int, size: int, store: Any) -> None:
        """Load this rank's shard, and follow rank 0 until it shuts its engine down."""
        group = ParallelGroup(rank, size, driven=True)
        device = rank_device(self.device_type, rank)
        with meanwhile(lambda: group.meet(rank_device(self.device_type, rank), store)):
            from hf_paged.engine.engine import Engine
            from hf_paged.models import check_over_ranks
            from hf_paged.parallel.loading import load

            model = load(self.path, group, dtype=self.dtype, device=device, files=self.files,
                         check_class=check_over_ranks)
        gc.freeze()  # modules and model live until the end: later collections need not scan them
        gc.enable()
        Engine(model, self.config, owns_device=True).follow()


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank on its host; a GPU is made current in this thread."""
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@contextmanager
def load_on_ranks(path_or_id: str | os.PathLike, size: int, dtype: str | torch.dtype, device: torch.device,
                  config: PagedConfig, files: dict[str, Any] | None = None) -> Iterator[tuple[Any, Workers | None]]:
    """Yield this rank's model, and the processes of the other ranks or None if torchrun started them. An exception in
    the block ends the processes.

    Inside the block other ranks may still be loading; all ranks have met when the block is left.

    Args:
        path_or_id, dtype, config: as for `PagedGenerator.from_pretrained`.
        size: number of ranks, at least 2.
        files: arguments of transformers' `from_pretrained` that say where files are found.
        device: the device type; ranks use the devices 0 to size - 1 of their host, or torchrun's LOCAL_RANK.

    Raises:
        ValueError: another number of processes or fewer devices than `size`, or a device of another kind or index.
        WorkerDiedError: a rank ended before all were ready.
    """
    if device.index not in (None, 0) or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={str(device)!r}: expected 'cuda', of which the ranks take 0 to {size - 1}, or 'cpu'")
    if not is_leading() and (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        from hf_paged.models import check_over_ranks
        from hf_paged.parallel.loading import load

        check_world(size)  # before this rank's GPU is made current
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        own = rank_device(device.type, int(os.environ.get("LOCAL_RANK", rank)))
        yield load(str(path_or_id), join(rank, size, own), dtype=dtype, device=own, files=files or {},
                   check_class=check_over_ranks), None
        return
    workers = launch(size, Follower(str(path_or_id), dtype, device.type, config, files or {}), device.type)
    try:
        from hf_paged.engine.locked_core import rehearse
        from hf_paged.models import check_over_ranks
        from hf_paged.parallel.loading import load

        own = rank_device(device.type, 0)
        with workers.meeting(own) as group:
            model = load(str(path_or_id), group, dtype=dtype, device=own, check=workers.check, files=files,
                         check_class=check_over_ranks)
            with group.alone(workers.check):  # compile while the others still import: they find compiled kernels
                rehearse(model, config)
            yield model, workers
    except BaseException:
        workers.close()
        raise
