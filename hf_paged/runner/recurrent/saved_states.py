"""Contents of snapshots: copies of the states in a slot, and of the keys and values behind the last full block."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_paged.models import KVSpec
from hf_paged.runner.kv_cache import KVCache
from hf_paged.scheduler.block_pool import NULL_BLOCK_ID
from hf_paged.scheduler.snapshots import StateMove

SNAPSHOTS_SHARE = 0.125  # of a memory budget, beside pages and the states of running sequences


class SavedStates:
    """The states of one sequence at one place, side by side, and ``tail``: K and V of each layer, [tokens,
    num_kv_heads, head_dim], of the tokens behind its last full block."""

    def __init__(self, states: torch.Tensor, tail: list[torch.Tensor]) -> None:
        self.states, self.tail = states, tail
        self.nbytes = sum(tensor.nbytes for tensor in (states, *tail))


def save(cache: KVCache, move: StateMove) -> None:
    """Fill a snapshot from a slot and a block."""
    rest = move.snapshot.position % cache.block_size if move.block_id != NULL_BLOCK_ID else 0
    tail = [tensor[move.block_id, :rest].clone() for tensors in cache.layers for tensor in tensors] if rest else []
    move.snapshot.content = cache.states.keep(SavedStates(cache.states.copy_of(move.slot), tail))


def save_all(cache: KVCache, moves: Iterable[StateMove]) -> None:
    for move in moves:
        save(cache, move)


def load(cache: KVCache, move: StateMove) -> None:
    """Fill a slot, and a block that no other sequence has, from a snapshot."""
    content: SavedStates = move.snapshot.content
    cache.states.put(move.slot, content.states)
    if move.block_id != NULL_BLOCK_ID:
        for tensor, tail in zip((tensor for tensors in cache.layers for tensor in tensors), content.tail, strict=True):
            tensor[move.block_id, : len(tail)] = tail


def most_snapshots(spec: KVSpec, block_size: int, budget: int) -> int:
    """Return how many snapshots have room in their share of `budget` bytes."""
    return max(1, int(budget * SNAPSHOTS_SHARE) // max(spec.state_bytes + spec.block_bytes(block_size), 1))
