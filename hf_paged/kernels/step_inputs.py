# mypy: disallow-untyped-defs=False
"""What a step's tokens need before the first layer: their ids, and where their keys and values go."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton

_TILE = 128


def step_inputs(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    write_from: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up T tokens by slot and position.

    Args:
        tokens: ``[S, capacity]`` int32, each slot's token history.
        block_table: ``[S, max_blocks]`` int32.
        slots, positions: ``[T]`` int64; position -1 is padding: it reads as position 0 and is not written.
        write_from: ``[T]`` int64, positions before it are not written; None: all are.
        block_size: tokens of a block.

    Returns:
        three ``[T]`` int64 tensors: token ids, positions (at least 0), and the slot mapping (-1: do not write).
    """
    runs = {"cuda": step_inputs_triton, "cpu": step_inputs_host}
    run = runs.get(tokens.device.type, step_inputs_reference)
    return run(tokens, block_table, slots, positions, write_from, block_size)


def step_inputs_reference(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    write_from: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`step_inputs` in plain torch."""
    at = positions.clamp(min=0)
    blocks = block_table[slots, at // block_size].long()
    unwritten = positions < (0 if write_from is None else write_from.clamp(min=0))
    slot_mapping = (blocks * block_size + at % block_size).masked_fill_(unwritten, -1)
    return tokens[slots, at].long(), at, slot_mapping


def step_inputs_host(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    write_from: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`step_inputs` on a CPU, in numpy, whose calls take a fraction of torch's."""
    slot, position = slots.numpy(), positions.numpy()
    at = np.maximum(position, 0)
    mapping = block_table.numpy()[slot, at // block_size].astype(np.int64) * block_size + at % block_size
    mapping[position < (0 if write_from is None else np.maximum(write_from.numpy(), 0))] = -1
    ids = tokens.numpy()[slot, at].astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(at), torch.from_numpy(mapping)


@jit(
    varying_ints=("num_tokens",),
    varying_pointers=("slots", "positions", "write_from", "ids", "places", "slot_mapping"),
)
def _step_inputs_kernel(
    tokens,
    block_table,
    slots,
    positions,
    write_from,
    ids,
    places,
    slot_mapping,
    num_tokens,
    tokens_stride,
    table_stride,
    HAS_WRITE_FROM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = token < num_tokens
    slot = tl.load(slots + token, mask=inside, other=0)
    position = tl.load(positions + token, mask=inside, other=0)
    at = tl.maximum(position, 0)
    written = position >= 0
    if HAS_WRITE_FROM:
        written &= position >= tl.load(write_from + token, mask=inside, other=0)
    block = tl.load(block_table + slot * table_stride + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token_id = tl.load(tokens + slot * tokens_stride + at, mask=inside, other=0)
    tl.store(ids + token, token_id.to(tl.int64), mask=inside)
    tl.store(places + token, at, mask=inside)
    tl.store(slot_mapping + token, tl.where(written, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), mask=inside)


def step_inputs_triton(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    write_from: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`step_inputs` as one Triton launch."""
    require_triton()
    ids, places, slot_mapping = torch.empty(3, len(slots), dtype=torch.int64, device=tokens.device)
    if not len(slots):
        return ids, places, slot_mapping
    with on_device_of(tokens):
        _step_inputs_kernel[(triton.cdiv(len(slots), _TILE),)](
            tokens,
            block_table,
            slots,
            positions,
            slots if write_from is None else write_from,
            ids,
            places,
            slot_mapping,
            len(slots),
            tokens.stride(0),
            block_table.stride(0),
            HAS_WRITE_FROM=write_from is not None,
            BLOCK_SIZE=block_size,
            TILE=_TILE,
            num_warps=4,
        )
    return ids, places, slot_mapping
