"""The job of the ranks that `PagedGenerator.from_pretrained` starts: load a share, and do what rank 0 does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_paged.config import PagedConfig
from hf_paged.engine import Engine
from hf_paged.integration.parallel.group import check_world, join
from hf_paged.integration.parallel.launch import Workers, is_leading, launch
from hf_paged.integration.parallel.loading import load


@dataclass(frozen=True)
class Follower:
    """A `worker.Job`. Arguments as of `PagedGenerator.from_pretrained`."""

    path: str
    dtype: str | torch.dtype
    device_type: str
    config: PagedConfig

    def run(self, rank: int, size: int, store: Any) -> None:
        """Until rank 0 shuts its engine down."""
        device = rank_device(self.device_type, rank)
        model = load(self.path, join(rank, size, device, store=store, driven=True), dtype=self.dtype, device=device)
        Engine(model, self.config, owns_device=True).follow()


def rank_device(device_type: str, rank: int) -> torch.device:
    """The device of a rank on its host; made current where it is a GPU."""
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def load_on_ranks(path_or_id: str | os.PathLike, size: int, dtype: str | torch.dtype, device: torch.device,
                  config: PagedConfig) -> tuple[Any, Workers | None]:  # fmt: skip
    """This rank's model, and the processes of the other ranks where they had to be started.

    Args:
        path_or_id, dtype, config: as for `PagedGenerator.from_pretrained`.
        size: number of ranks, at least 2.
        device: its type counts; ranks take the devices 0 to size - 1 of their host, or torchrun's LOCAL_RANK.

    Raises:
        ValueError: another number of processes or fewer devices than `size`, or a device of another kind or index.
        WorkerDiedError: a rank ended before all were ready.
    """
    if device.index not in (None, 0) or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={str(device)!r}: expected 'cuda', of which the ranks take 0 to {size - 1}, or 'cpu'")
    if not is_leading() and (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        return _load_here(path_or_id, size, dtype, device), None
    workers = launch(size, Follower(str(path_or_id), dtype, device.type, config), device.type)
    try:
        own = rank_device(device.type, 0)
        model = load(str(path_or_id), workers.join(own), dtype=dtype, device=own)
        workers.check()
    except BaseException:
        workers.close()
        raise
    return model, workers


def _load_here(path_or_id: str | os.PathLike, size: int, dtype: str | torch.dtype, device: torch.device) -> Any:
    """Every rank runs this script."""
    check_world(size)  # before this rank's GPU is made current
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    own = rank_device(device.type, int(os.environ.get("LOCAL_RANK", rank)))
    return load(str(path_or_id), join(rank, size, own), dtype=dtype, device=own)
