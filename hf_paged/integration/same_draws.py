"""Random numbers of stock code that every rank of a sharded model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_paged.engine.engine import Engine


@contextmanager
def same_draws(engine: Engine) -> Iterator[None]:
    """Give all ranks rank 0's random numbers within the context: different tokens would corrupt their sums."""
    group, device = engine.group, engine.model.device
    if not group.is_parallel:
        yield
        return
    on_gpu = device.type == "cuda"
    host, gpu = group.broadcast((torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None))
    with torch.random.fork_rng([device] if on_gpu else [], enabled=group.rank > 0):
        if group.rank > 0:
            torch.set_rng_state(host)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu, device)
        yield
