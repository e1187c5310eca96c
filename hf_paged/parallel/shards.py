"""Part of a checkpoint's tensor that a rank holds: the arithmetic that layers, loading and tests share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.sampling.sample_tokens import GROUP_SIZE

# Vocabulary rows of a rank are a multiple of the sampler's GROUP_SIZE, or of this number in small vocabularies.
_FEW_ROWS = 16


class Shard(NamedTuple):
    """Part of a tensor of `shape`: `ranges` [start, stop) along `dim`, concatenated, then `padding` zeros."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the rank's own part."""
        size = sum(stop - start for start, stop in self.ranges) + self.padding
        return *self.shape[: self.dim], size, *self.shape[self.dim + 1 :]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Shard:
        """Return the shard that is the whole tensor, on every rank."""
        return Shard(tuple(shape), 0, ((0, shape[0]),))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor, as a copy."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)}: expected {self.shape}")
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if self.padding:
            size = list(tensor.shape)
            size[self.dim] = self.padding
            parts.append(tensor.new_zeros(size))
        return torch.cat(parts, self.dim)


def even_range(total: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """Return a rank's range [start, stop) of `total` in equal parts.

    Raises:
        ValueError: `total` does not divide by `size`; the message names `what`.
    """
    if total % size:
        raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={size}: expected a divisor")
    each = total // size
    return rank * each, (rank + 1) * each


def local_kv_heads(kv_heads: int, size: int) -> int:
    """Return how many KV heads a rank holds: its part of them, or one that other ranks hold, too.

    Raises:
        ValueError: neither number divides the other.
    """
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} and tensor_parallel_size={size}: expected one to divide the "
                         "other")
    return max(1, kv_heads // size)


def kv_head_range(kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of a rank's KV heads, which its query heads attend to."""
    first = rank * kv_heads // size
    return first, first + local_kv_heads(kv_heads, size)


def vocab_rows(vocab_size: int, size: int) -> int:
    """Return rows of embedding and head on each rank, with the last ranks' padding; one rank has no padding."""
    if size == 1:
        return vocab_size
    multiple = GROUP_SIZE if vocab_size > size * GROUP_SIZE else _FEW_ROWS
    return -(-vocab_size // (size * multiple)) * multiple


def vocab_shard(shape: tuple[int, ...], rank: int, size: int) -> Shard:
    """Return the rows of an embedding [vocab_size, ...] on a rank."""
    rows = vocab_rows(shape[0], size)
    start, stop = (min(shape[0], edge * rows) for edge in (rank, rank + 1))
    return Shard(tuple(shape), 0, ((start, stop),), rows - (stop - start))
