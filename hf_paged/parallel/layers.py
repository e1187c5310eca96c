"""Layers of which each rank holds a part. They are for inference only: their collectives have no gradient.

A layer is made from the stock layer that it replaces, on the stock layer's device (meta, in `loading`), and its
parameters have stock's names. `group` holds its ranks. With a group of one the layer holds all of each parameter, and
computes what the stock layer does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_paged.parallel.group import ParallelGroup
from hf_paged.sampling.sample_tokens import GROUP_SIZE

# Vocabulary rows of a rank are a multiple of the sampler's GROUP_SIZE, or of this number in small vocabularies.
_FEW_ROWS = 16


class Sharded:
    """Mixin for the class of a layer of which a rank holds a part."""

    group: ParallelGroup
    shards: dict[str, Shard]  # by parameter: which part of the stock parameter the layer holds

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Refuse `state_dict` and `save_pretrained`, which would save a part as the whole under its name."""
        if self.group.is_parallel:
            raise RuntimeError(
                f"state_dict of {prefix.rstrip('.') or type(self).__name__}, of which rank {self.group.rank} of "
                f"{self.group.size} holds a part: expected a model that is not sharded (tensor_parallel_size=1, or "
                "transformers' from_pretrained) to save it; `named_weights` of the PagedGenerator or Engine gives "
                "whole tensors, named_parameters() this rank's parts"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]


class ColumnParallelLinear(Sharded, nn.Linear):
    """Linear layer of `rows` [start, stop) of weight [n, k] and bias, local: [..., k] -> [..., stop - start]."""

    def __init__(self, linear: nn.Linear, group: ParallelGroup, rows: tuple[int, int]) -> None:
        full, width = linear.weight.shape
        super().__init__(width, rows[1] - rows[0], linear.bias is not None, **_like(linear.weight))
        self.group = group
        self.shards = {"weight": Shard((full, width), 0, (rows,)), "bias": Shard((full,), 0, (rows,))}


class RowParallelLinear(Sharded, nn.Linear):
    """Linear layer of `columns` [start, stop) of weight [n, k]: [..., stop - start] -> [..., n], equal on all ranks.

    The sum over ranks comes first, then the bias, which every rank holds.
    """

    def __init__(self, linear: nn.Linear, group: ParallelGroup, columns: tuple[int, int]) -> None:
        height, full = linear.weight.shape
        super().__init__(columns[1] - columns[0], height, linear.bias is not None, **_like(linear.weight))
        self.group = group
        self.shards = {"weight": Shard((height, full), 1, (columns,)), "bias": Shard.whole((height,))}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.group.is_parallel:
            return F.linear(input, self.weight, self.bias)
        return self.finish(F.linear(input, self.weight))

    def finish(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the layer's output from this rank's product, if there are several ranks."""
        output = self.group.all_reduce(partial)
        return output if self.bias is None else output + self.bias


class GatheringLinear(ColumnParallelLinear):
    """Linear layer of `rows` of a weight whose output every rank gets whole: [..., k] -> [..., n]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = F.linear(input, self.weight, self.bias)
        return self.group.all_gather(local).movedim(0, -2).flatten(-2) if self.group.is_parallel else local


class SplittingLinear(RowParallelLinear):
    """Linear layer of `columns` of a weight whose input every rank has whole: [..., k] -> [..., n]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        [(start, stop)] = self.shards["weight"].ranges
        return super().forward(input[..., start:stop])


class ReplicatedLinear(Sharded, nn.Linear):
    """Linear layer that every rank holds whole."""

    def __init__(self, linear: nn.Linear, group: ParallelGroup) -> None:
        height, width = linear.weight.shape
        super().__init__(width, height, linear.bias is not None, **_like(linear.weight))
        self.group = group
        self.shards = {"weight": Shard.whole((height, width)), "bias": Shard.whole((height,))}


class ShardedEmbedding(Sharded):
    """Mixin for a class of embeddings of `vocab_rows` rows: ids [...] -> [..., hidden_size], the same on each rank.

    The stock class may scale its vectors.
    """

    stock: type[nn.Module] = nn.Embedding
    vocab_size: int
    num_embeddings: int
    first: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor
        if not self.group.is_parallel:
            vectors = super().forward(input)  # type: ignore[misc]
            return vectors
        return self.group.all_reduce(self.own_vectors(input, 0.0))

    def own_vectors(self, input: torch.Tensor, others: float) -> torch.Tensor:
        """Embed ids [...] without other ranks: each number of a vector that another rank has is `others`."""
        local = input - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        vectors: torch.Tensor = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        return vectors.masked_fill(elsewhere[..., None], others)


class VocabParallelEmbedding(ShardedEmbedding, nn.Embedding):
    """A rank's part of a `torch.nn.Embedding`."""


class VocabParallelHead(Sharded, nn.Linear):
    """Head of `vocab_rows` rows: [..., hidden_size] -> all logits [..., vocab_size], the same on each rank.

    Of this rank's own columns the first `num_real` are the tokens from `first` on. Further columns are padding, whose
    logits have no meaning.
    """

    def __init__(self, linear: nn.Linear, group: ParallelGroup) -> None:
        shard = vocab_shard(tuple(linear.weight.shape), group.rank, group.size)
        start, stop = shard.ranges[0]
        rows = stop - start + shard.padding
        super().__init__(linear.in_features, rows, linear.bias is not None, **_like(linear.weight))
        self.group = group
        self.vocab_size = linear.out_features
        self.first, self.num_real = group.rank * rows, stop - start
        self.shards = {"weight": shard, "bias": vocab_shard((linear.out_features,), group.rank, group.size)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.gathered(self.own_columns(input))

    def own_columns(self, input: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns [..., rows]."""
        return F.linear(input, self.weight, self.bias)

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the columns [..., rows] of every rank -> all logits [..., vocab_size]."""
        if not self.group.is_parallel:
            return local
        columns = self.group.all_gather(local).movedim(0, -2)
        return columns.flatten(-2)[..., : self.vocab_size]


class UpdateMatrix(Sharded, nn.Linear):
    """Matrix [m, k] of a LoRA update of experts' weights: the rows or columns that a rank's part of the weights has.

    Its weight is read, and no token is multiplied with it.
    """

    def __init__(self, group: ParallelGroup, shard: Shard, **kind: Any) -> None:
        height, width = shard.part_shape
        super().__init__(width, height, bias=False, **kind)
        self.group, self.shards = group, {"weight": shard}


SHARDED_LAYERS = (ColumnParallelLinear, GatheringLinear, ReplicatedLinear, RowParallelLinear, SplittingLinear,
                  UpdateMatrix, VocabParallelEmbedding, VocabParallelHead)


class ShardedExperts(Sharded):
    """Mixin for a stock class of fused experts: each rank holds a part of every expert, and the outputs are summed.

    The same slice of the inner dimension is taken of gates and ups in gate_up_proj [experts, 2 * inner, hidden] and of
    down_proj [experts, hidden, inner].
    """

    stock: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.group.all_reduce(super().forward(*args, **kwargs).contiguous())  # type: ignore[misc]


@cache
def sharded_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Return the sharded class for a stock class of experts or embeddings; always the same class."""
    if stock is nn.Embedding:
        return VocabParallelEmbedding
    mixin = ShardedEmbedding if issubclass(stock, nn.Embedding) else ShardedExperts
    return type(f"Sharded{stock.__name__}", (mixin, stock), {"stock": stock, "__module__": __name__})


def stock_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the stock class that a sharded class was made from; any other class itself."""
    return kind.stock if issubclass(kind, (ShardedExperts, ShardedEmbedding)) else kind


def shard_embedding(embedding: Any, group: ParallelGroup) -> None:
    """Make an embedding of any class, on any device, hold this rank's rows; other attributes are kept."""
    shard = vocab_shard(tuple(embedding.weight.shape), group.rank, group.size)
    embedding.vocab_size = embedding.num_embeddings
    embedding.weight = nn.Parameter(shard.take(embedding.weight.data), requires_grad=embedding.weight.requires_grad)
    embedding.num_embeddings, embedding.padding_idx = len(embedding.weight), None
    embedding.first = group.rank * embedding.num_embeddings
    kind: Any = type(embedding)
    embedding.__class__ = sharded_class(kind)
    embedding.group, embedding.shards = group, {"weight": shard}


def shard_experts(experts: Any, group: ParallelGroup, inner: tuple[int, int]) -> None:
    """Make a stock module of fused experts, on the meta device, hold `inner` [start, stop) of every expert.

    All attributes but the inner size are kept, since they differ from class to class. A model that is not on the meta
    device gets the values of its part at once.
    """
    start, stop = inner
    total, shape = experts.down_proj.shape[2], tuple(experts.gate_up_proj.shape)
    shards = {
        "gate_up_proj": Shard(shape, 1, ((start, stop), (total + start, total + stop))),
        "down_proj": Shard(tuple(experts.down_proj.shape), 2, ((start, stop),)),
    }
    for name, shard in shards.items():
        stock = getattr(experts, name)
        setattr(experts, name, nn.Parameter(shard.take(stock.data), requires_grad=stock.requires_grad))
    experts.intermediate_dim = stop - start
    kind: Any = type(experts)
    experts.__class__ = sharded_class(kind)
    experts.group, experts.shards = group, shards


def shard_of(module: nn.Module, parameter: str) -> Shard:
    """Return the part of the stock parameter that a module holds: all of it, unless the module is sharded."""
    if isinstance(module, Sharded):
        return module.shards[parameter]
    return Shard.whole(tuple(getattr(module, parameter).shape))


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module holds a part of a layer, whose rest is on other ranks."""
    return isinstance(module, Sharded) and module.group.is_parallel


def _like(weight: torch.Tensor) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}


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

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (start in the part, start in the whole tensor, size) of each range."""
        sizes = [stop - start for start, stop in self.ranges]
        return [(sum(sizes[:i]), start, sizes[i]) for i, (start, _) in enumerate(self.ranges)]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Shard:
        """Return the shard that is the whole tensor, on every rank."""
        return Shard(tuple(shape), 0, ((0, shape[0]),) if shape else ())

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
