"""Arguments of attention kernels for one step: which tokens belong to which sequence, and their places in the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


class AttentionSpec(NamedTuple):
    """Sizes of a model's attention, the largest ones where calls differ; heads are a rank's."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # of keys or values
    dtype: torch.dtype  # of queries and caches
    device: torch.device
    block_size: int
    are_calls_alike: bool = True  # all attention calls have the same sizes
    has_value_dim: bool = False  # values of some attention call are not as wide as its keys

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Settings by which scores become weights; the same for every token of a call.

    Attributes:
        scale: factor of the scores before softcap and softmax.
        window: number of visible tokens, the token itself included; None: all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: unchanged.
        sinks: ``[Hq]`` contiguous, floats: per query head one more score, neither scaled nor capped, that takes part in
            the softmax and has no value (gpt-oss); None: none.
        chunk: tokens see positions from the last multiple of ``chunk`` on (Llama 4); None: from 0, or as ``window``.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None


def positively_scaled(q: torch.Tensor, options: AttentionOptions) -> tuple[torch.Tensor, AttentionOptions]:
    """Return queries and options with the same scores and a scale above 0.

    Code that takes the largest score, or masks scores, before scaling needs this: -inf times a negative number is inf.
    """
    if options.scale > 0.0:
        return q, options
    if options.scale < 0.0:
        return -q, replace(options, scale=-options.scale)
    return torch.zeros_like(q), replace(options, scale=1.0)


class WorkItem(NamedTuple):
    """Columns of `DecodeWork.items`: a split of a row."""

    row: Any  # -1: nothing to do
    split: Any  # its number within the row
    num_splits: Any  # of the row
    length: Any  # visible tokens of the row
    slot: Any  # of the row


ITEM_FIELDS = len(WorkItem._fields)


class DecodeWork(NamedTuple):
    """The splits of a step's rows: a program of the decode kernel computes one of them for one KV head."""

    items: torch.Tensor  # [N, ITEM_FIELDS] int32, see `WorkItem`; the splits of a row follow each other
    arrivals: torch.Tensor  # [at least R * Hkv] int32, all 0: counts finished splits, and is 0 again afterwards


class PartItem(NamedTuple):
    """Columns of `GroupedWork.items`: what one program of a grouped step computes for one KV head.

    Either a split of positions that a tile of a group's rows share, or a split of a row's own positions, behind what it
    shares. A split of positions `begin` to `end - 1` is one of `splits` about equal cuts of them, or of those in sight.
    """

    rows: Any  # of the group, in this tile; 0: a row's own, -1: nothing to do
    first: Any  # of the group: the first row's number among the members; a row's own: the row
    slot: Any  # whose line of the block table says where the positions lie
    begin: Any
    end: Any
    split: Any
    splits: Any
    part: Any  # of the group: number of the piece of each of its rows; a row's own: place of the piece, -1: it is all
    length: Any  # a row's own: visible tokens of the row


class RowEntry(NamedTuple):
    """Columns of `GroupedWork.rows`, two tables in one: line i is of row i, and of the groups' member i."""

    part: Any  # of the row: the place of its first piece
    pieces: Any  # of the row
    member: Any  # the member's row
    member_part: Any  # the place of its first piece
    member_length: Any  # its visible tokens


PART_FIELDS, ROW_FIELDS = len(PartItem._fields), len(RowEntry._fields)


class GroupedConfig(NamedTuple):
    """Tiles of a group's positions and of a row's own ones, and launch options, of the kernel of grouped steps."""

    block_m: int  # rows of a group times query heads of a KV head
    block_n: int  # positions
    num_stages: int
    own_block_n: int
    own_stages: int
    num_warps: int
    programs_per_sm: int  # how many such programs a multiprocessor holds
    max_registers: int | None = None  # of a thread, so that it holds as many


class GroupedWork(NamedTuple):
    """The work of a step in which rows share prefixes, which one program reads for several of them.

    A row's pieces are numbered: what it shares from the start on, then its own. Each becomes a part, a result before
    the division by the sum of weights; rows of several pieces are joined afterwards.
    """

    items: torch.Tensor  # [N, PART_FIELDS] int32, see `PartItem`
    rows: torch.Tensor  # [R, ROW_FIELDS] int32, see `RowEntry`
    num_parts: int  # at least the number of all pieces
    config: GroupedConfig  # that the plan was made for


class PromptWork(NamedTuple):
    """The work of prompts that share prefixes: what lies ahead of all new tokens is read once for a tile of them.

    As `GroupedWork`, of tokens in place of rows. All items are of groups; what a row sees behind is no piece.
    """

    shared: GroupedWork  # rows [T, ROW_FIELDS]
    own_begin: torch.Tensor  # [R] int32, where a row's own positions begin, a multiple of the block size


class TileQueue(NamedTuple):
    """A queue from which programs take tiles of rows of several new tokens, one tile at a time.

    One launch uses it at a time: the layers of a step, one after the other.
    """

    counters: torch.Tensor  # [2] int32, all 0 and 0 again afterwards: tiles taken, programs that found none


class PagedMetadata(NamedTuple):
    """One step's layout, on the device of the KV pool. R rows (sequences) bring T new tokens, packed row after row.

    Row r's new tokens are the last ``query_start[r+1] - query_start[r]`` of the ``seq_lens[r]`` tokens that it may
    see; token j of a sequence lies in block ``block_table[slots[r], j // block_size]`` at ``j % block_size``.
    ``max_query_len`` and ``max_seq_len`` are upper bounds known on the host, so that no launch waits for the device.
    """

    query_start: torch.Tensor  # [R + 1] int32, cumulative count of new tokens
    seq_lens: torch.Tensor  # [R] int32, tokens visible to the row's last new token (cached + new)
    block_table: torch.Tensor  # [S, max_blocks] int32, one line a slot (S >= R); entries past the end are undefined
    slots: torch.Tensor  # [R] int32, the row's line in block_table
    slot_mapping: torch.Tensor  # [T] int64, block_id * block_size + offset of each new token; -1: do not write it
    max_query_len: int
    max_seq_len: int
    # The work of programs. Rows of one new token: None cuts all alike. Other rows: prefixes that are read for several
    # rows, or a queue of tiles; None gives every program an equal share of the tiles.
    work: DecodeWork | GroupedWork | PromptWork | TileQueue | None = None
    host_rows: Any = None  # `HostRows` for the torch backend; None: they are worked out in every layer
