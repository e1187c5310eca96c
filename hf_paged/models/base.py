"""What a model's layers and the runner know of each other: the shape of the cache, and a step of packed tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.kernels.attention.reference import Pages, SingleRow, attend_row
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, DecodeWork, GroupedWork, PagedMetadata

Parts = list[tuple[int, int, PagedMetadata]]


class PoolShape(NamedTuple):
    """Sizes of the pools of one attention call: K and V of [num_blocks, block_size, num_kv_heads, head or value dim].
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int


class AttentionMask(NamedTuple):
    """Which positions an attention call reads: `AttentionOptions.window` and `AttentionOptions.chunk`."""

    window: int | None
    chunk: int | None = None

    @property
    def most(self) -> int | None:
        """Maximum of positions that a token reads; None: all."""
        return self.window if self.chunk is None else self.chunk


StateKey = tuple[int, str, int]  # layer, "conv" or "recurrent", and number among the layer's states of that kind


class StateShape(NamedTuple):
    """A recurrent state of each sequence: its shape, and the dtype in which stock keeps it."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the state of one sequence takes: by lines of 64, so that all states begin at one."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // 64) * 64


class RoutesShape(NamedTuple):
    """Shape of a token's routes: ``num_layers`` with a router, ``top_k`` experts in each, stored in ``dtype``."""

    num_layers: int
    top_k: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of the routes of one token."""
        return self.num_layers * self.top_k * self.dtype.itemsize


class KVSpec(NamedTuple):
    """Shape of the cache that a model needs: per attention call K and V of [num_blocks, block_size, num_kv_heads,
    head_dim].

    ``cache_dtype`` is the dtype of K and V, ``compute_dtype`` that of the embedding and the first hidden states. They
    differ only under autocast, where linear layers and attention compute in ``cache_dtype``. Heads are one rank's.
    ``pools``: the sizes of each call's pools, where K and V, or two calls, are not alike; (): all are alike.
    ``are_calls_alike``: whether all calls have the same sizes, and as many heads of queries.
    ``states``: what layers without pages keep of a sequence, whatever its length.
    ``routes``: the experts of each token that the pool keeps as well; None: none.
    """

    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    cache_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    pools: tuple[PoolShape, ...] = ()
    are_calls_alike: bool = True
    states: tuple[StateShape, ...] = ()
    routes: RoutesShape | None = None

    def pool_shapes(self) -> tuple[PoolShape, ...]:
        """Return the sizes of the pools of each attention call."""
        return self.pools or (PoolShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    def attention(self, block_size: int) -> AttentionSpec:
        """What backends of attention are told of the model."""
        shapes = self.pool_shapes() or (PoolShape(self.num_kv_heads, self.head_dim, self.head_dim),)
        heads, keys, values = (max(sizes) for sizes in zip(*shapes, strict=True))
        has_value_dim = any(shape.head_dim != shape.value_dim for shape in self.pools)
        return AttentionSpec(self.num_heads, heads, max(keys, values), self.cache_dtype, self.device, block_size,
                             self.are_calls_alike, has_value_dim)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that one block takes over all layers."""
        elements = sum(position_elements(shape) for shape in self.pool_shapes())
        routes = 0 if self.routes is None else self.routes.token_bytes
        return block_size * (elements * self.cache_dtype.itemsize + routes)

    @property
    def are_tensors_alike(self) -> bool:
        """Whether the pool is made of tensors of one size, K and V of each attention call."""
        return not self.pools and self.num_layers > 0 and self.routes is None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(state.nbytes for state in self.states)


def position_elements(shape: PoolShape) -> int:
    """Return the elements of K and V of one position."""
    return shape.num_kv_heads * (shape.head_dim + shape.value_dim)


class LastTokens(NamedTuple):
    """The last token of each row: ``tokens`` [R] int64, indices in the step, and their `StepContext.parts`."""

    tokens: torch.Tensor
    parts: Parts


class SeenRow(NamedTuple):
    """Tokens of a step's row that see others than the window of attention calls says: later ones, for instance.

    Attributes:
        first, end: the tokens, `first` to `end` - 1 of the step.
        pages: the row's positions up to the last one that they see, S of them.
        masks: [n, S] bool, which of them each token sees, by the window of attention calls.
    """

    first: int
    end: int
    pages: Pages
    masks: Mapping[int | None, torch.Tensor]


class FedTokens(NamedTuple):
    """What the decoder of a step of T packed tokens is fed in place of ids and cache positions, of images for instance.

    Attributes:
        rows: by the name of the decoder's input, tokens [n] int64 in the step and their rows [n, ...].
        positions: [A, T] int64, RoPE's positions of all tokens, for each axis; None: `StepContext.positions`.
        seen: rows with tokens that see others than the masks of attention calls say.
    """

    rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    positions: torch.Tensor | None
    seen: Sequence[SeenRow] = ()


class StepContext(NamedTuple):
    """Step of T packed tokens as a model's layers use it: positions, cache slots, and attention over the pages.

    Attributes:
        positions: [T] int64, position of each token in its sequence.
        slot_mapping: [T] int64, cache slot of each token's key and value; -1: not stored.
        cache: the runner's `KVCache`.
        parts: (first token, end, metadata) of rows that share a kernel.
        adapters: [T] int32, the adapter of each token: 0 the model's active ones, -1 none, i > 0 the i-th of
            `ModelExecutor.adapter_names` alone. None: 0 for all tokens.
        one_launch: whether one launch may compute all layers: no row reads KV that another row writes, and there are
            few enough rows for it to be faster.
        ends: the tokens whose result of the last layer is used; None if all tokens are.
        fed: what is fed in place of ids; None if nothing is.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: Any
    parts: Parts
    backend: AttentionBackend
    adapters: torch.Tensor | None = None
    one_launch: bool = False
    ends: LastTokens | None = None
    fed: FedTokens | None = None

    @property
    def decode_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Block-table lines [T] int32 of the rows, and the table [S, max_blocks] int32, in a step of few decode rows,
        each the only new token of its sequence. None for other steps."""
        if not self.one_launch or len(self.parts) != 1:
            return None
        meta = self.parts[0][2]
        if isinstance(meta.work, GroupedWork):
            return None
        return meta.slots, meta.block_table

    @property
    def row_lengths(self) -> torch.Tensor | None:
        """Length [T] int32 of each token's sequence in a step of decode rows, 0 for padding; None for other steps."""
        if len(self.parts) != 1:
            return None
        meta = self.parts[0][2]
        is_decode = isinstance(meta.work, (DecodeWork, GroupedWork)) and len(meta.seq_lens) == len(self.positions)
        return meta.seq_lens if is_decode else None

    @property
    def wanted(self) -> torch.Tensor | None:
        """[W] int64, the tokens whose final hidden states are read; None: all tokens."""
        return None if self.ends is None else self.ends.tokens

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V pool of a layer."""
        pools: tuple[torch.Tensor, torch.Tensor] = self.cache.layers[layer]
        return pools

    def last_token_step(self) -> StepContext:
        """Return the tokens `wanted` as a step of their own, whose keys and values are in the pages."""
        assert self.ends is not None
        return self._replace(parts=self.ends.parts, ends=None)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend by query [T, Hq, D] over the pages, which hold the step's own keys and values, too -> [T, Hq, Dv]."""
        k_cache, v_cache = self.cache.layers[layer]
        if self.fed is not None and self.fed.seen:
            return self._attend_to_seen(layer, query, options)
        if len(self.parts) == 1:
            return self.backend.run(query, k_cache, v_cache, self.parts[0][2], options)
        mixed = query.new_empty((*query.shape[:2], v_cache.shape[3]))
        for first, last, meta in self.parts:
            self.backend.run(query[first:last], k_cache, v_cache, meta, options, mixed[first:last])
        return mixed

    def _attend_to_seen(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend as `attend`, with the masks of `FedTokens.seen`, by the reference."""
        assert self.fed is not None
        found = self._replace(fed=None).attend(layer, query, options)
        for first, end, pages, masks in self.fed.seen:
            if (mask := masks.get(options.window)) is not None:
                row = SingleRow(first, end, pages, mask, causal=False)
                found[first:end] = attend_row(query[first:end], *self.kv_cache(layer), row, options)
        return found
