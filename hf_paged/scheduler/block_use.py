"""Counts of a pool's blocks by their use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import BlockPool


class BlockUse(NamedTuple):
    """Numbers of blocks without the null block: with one user, with several, unused but cached, and unused."""

    private: int
    shared: int
    cached: int
    free: int


def block_columns(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """Return each block's number of users [N] int32 and whether it is cached [N] bool, the null block included."""
    blocks = pool.blocks
    users = np.fromiter((block.ref_count for block in blocks), np.int32, len(blocks))
    cached = np.fromiter((block.digest is not None for block in blocks), bool, len(blocks))
    return users, cached


def block_use(pool: BlockPool) -> BlockUse:
    """Count the blocks by use; takes some milliseconds for 100,000 blocks."""
    users, cached = (column[1:] for column in block_columns(pool))
    unused = users == 0
    return BlockUse(int((users == 1).sum()), int((users > 1).sum()), int((unused & cached).sum()),
                    int((unused & ~cached).sum()))
