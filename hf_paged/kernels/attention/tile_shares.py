"""How evenly `hopper_prefill` deals the tiles of rows of new tokens to its programs."""

from __future__ import annotations

import numpy as np

from hf_paged.kernels.attention.hopper_support import POSITIONS

# What a tile costs besides the positions it sees, in tiles of keys: its queries come, its result goes. An estimate.
_FIXED_COST = 1.0


def imbalance(num_new: np.ndarray, seq_lens: np.ndarray, tokens: int, bundles: int, programs: int) -> float:
    """How many times as long the launch takes as it could, where tiles are dealt back and forth.

    Args:
        num_new: ``[R]``, new tokens of each row, the last ones of its ``seq_lens`` ``[R]``.
        tokens: of a tile.
        bundles: items that each tile is, of equal cost: groups of heads.
        programs: among which items are dealt.
    """
    tiles = -(-num_new // tokens)
    row = np.repeat(np.arange(len(num_new)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)  # within the row, its last tile first
    before = (tiles[row] - 1 - number) * tokens
    seen = seq_lens[row] - num_new[row] + np.minimum(before + tokens, num_new[row])
    # Rows begin at numbers that need no table: between two of them some belong to none.
    number += (np.cumsum(num_new) - num_new)[row] // tokens + row
    num_items = (int(num_new.sum()) // tokens + len(num_new)) * bundles
    costs = np.zeros((-(-num_items // programs), programs))
    items = costs.reshape(-1)[:num_items].reshape(-1, bundles)
    items[number] = (np.ceil(seen / POSITIONS) + _FIXED_COST)[:, None]
    costs[1::2] = costs[1::2, ::-1].copy()
    shares = costs.sum(0)
    return float(shares.max() / max(shares.mean(), costs.max()))
