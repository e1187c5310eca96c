"""What the blocks of a pool are used for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import BlockPool


class BlockUse(NamedTuple):
    """Numbers of blocks, the null block left out: of one user, of several, of none but findable, and of none."""

    private: int
    shared: int
    cached: int
    free: int


def block_columns(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """Of every block, the null block included: how many use it [N] int32, and is it in the prefix cache [N] bool."""
    blocks = pool.blocks
    users = np.fromiter((block.ref_count for block in blocks), np.int32, len(blocks))
    cached = np.fromiter((block.digest is not None for block in blocks), bool, len(blocks))
    return users, cached


def block_use(pool: BlockPool) -> BlockUse:
    """Counted block by block: some milliseconds for a hundred thousand."""
    users, cached = (column[1:] for column in block_columns(pool))
    unused = users == 0
    return BlockUse(int((users == 1).sum()), int((users > 1).sum()), int((unused & cached).sum()),
                    int((unused & ~cached).sum()))
