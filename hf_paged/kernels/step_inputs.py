# mypy: disallow-untyped-defs=False
"""What a step's tokens need before the first layer: their ids, and where their keys and values go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hf_paged.kernels._triton import cdiv, jit, on_device_of, require_triton, tl

_TILE = 128


class StepInputs(NamedTuple):
    """What `step_inputs` finds, [T] each: token ids, positions (at least 0) and the slot mapping (-1: do not write),
    int64. Of decode rows the tokens that attention sees and the slots once more, int32; None of prompts."""

    ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor | None = None
    slots: torch.Tensor | None = None


def step_inputs(
    tokens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    write_from: torch.Tensor | None, block_size: int,
) -> StepInputs:
    """Look up T tokens by slot and position.

    Args:
        tokens: ``[S, capacity]`` int32, each slot's token history.
        block_table: ``[S, max_blocks]`` int32.
        slots, positions: ``[T]`` int64; position -1 is padding: it reads as position 0 and is not written.
        write_from: ``[T]`` int64, positions before it are not written; None: these are decode rows, which write all.
        block_size: tokens of a block.
    """
    runs = {"cuda": step_inputs_triton, "cpu": step_inputs_host}
    run = runs.get(tokens.device.type, step_inputs_reference)
    return run(tokens, block_table, slots, positions, write_from, block_size)


def step_inputs_reference(
    tokens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    write_from: torch.Tensor | None, block_size: int,
) -> StepInputs:
    """:func:`step_inputs` in plain torch."""
    at = positions.clamp(min=0)
    blocks = block_table[slots, at // block_size].long()
    unwritten = positions < (0 if write_from is None else write_from.clamp(min=0))
    slot_mapping = (blocks * block_size + at % block_size).masked_fill_(unwritten, -1)
    found = StepInputs(tokens[slots, at].long(), at, slot_mapping)
    return found if write_from is not None else found._replace(seq_lens=(positions + 1).int(), slots=slots.int())


def step_inputs_host(
    tokens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    write_from: torch.Tensor | None, block_size: int,
) -> StepInputs:
    """:func:`step_inputs` on a CPU, in numpy, whose calls take a fraction of torch's."""
    slot, position = slots.numpy(), positions.numpy()
    at = np.maximum(position, 0)
    mapping = block_table.numpy()[slot, at // block_size].astype(np.int64) * block_size + at % block_size
    mapping[position < (0 if write_from is None else np.maximum(write_from.numpy(), 0))] = -1
    ids = tokens.numpy()[slot, at].astype(np.int64)
    found = StepInputs(*map(torch.from_numpy, (ids, at, mapping)))
    if write_from is not None:
        return found
    rows = (position + 1).astype(np.int32), slot.astype(np.int32)
    return StepInputs(*found[:3], *map(torch.from_numpy, rows))


@jit(
    varying_ints=("num_tokens",),
    varying_pointers=("slots", "positions", "write_from", "ids", "places", "slot_mapping", "seq_lens", "lines"),
)
def _step_inputs_kernel(
    tokens, block_table, slots, positions, write_from, ids, places, slot_mapping, seq_lens, lines, num_tokens,
    tokens_stride, table_stride, ARE_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = token < num_tokens
    slot = tl.load(slots + token, mask=inside, other=0)
    position = tl.load(positions + token, mask=inside, other=0)
    at = tl.maximum(position, 0)
    written = position >= 0
    if ARE_ROWS:
        tl.store(seq_lens + token, (position + 1).to(tl.int32), mask=inside)
        tl.store(lines + token, slot.to(tl.int32), mask=inside)
    else:
        written &= position >= tl.load(write_from + token, mask=inside, other=0)
    block = tl.load(block_table + slot * table_stride + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token_id = tl.load(tokens + slot * tokens_stride + at, mask=inside, other=0)
    tl.store(ids + token, token_id.to(tl.int64), mask=inside)
    tl.store(places + token, at, mask=inside)
    tl.store(slot_mapping + token, tl.where(written, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), mask=inside)


def step_inputs_triton(
    tokens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    write_from: torch.Tensor | None, block_size: int,
) -> StepInputs:
    """:func:`step_inputs` as one Triton launch."""
    require_triton()
    found = StepInputs(*torch.empty(3, len(slots), dtype=torch.int64, device=tokens.device))
    if write_from is None:  # in memory of their own, whose alignment attention's kernels know
        seq_lens, lines = (torch.empty(len(slots), dtype=torch.int32, device=tokens.device) for _ in range(2))
        found = found._replace(seq_lens=seq_lens, slots=lines)
    if not len(slots):
        return found
    with on_device_of(tokens):
        _step_inputs_kernel[(cdiv(len(slots), _TILE),)](
            tokens, block_table, slots, positions, slots if write_from is None else write_from, *found[:3],
            *(found[:2] if write_from is not None else found[3:]), len(slots), tokens.stride(0), block_table.stride(0),
            ARE_ROWS=write_from is None, BLOCK_SIZE=block_size, TILE=_TILE, num_warps=4,
        )
    return found
