"""How the rows of a decode step are cut into pieces of work, longest first, so that all multiprocessors end together.

The host knows every length before a step is launched, so it plans; the kernel's grid has a fixed number of items, and a
CUDA graph reads another plan at every replay. Planning on the host as in FlashInfer (Ye et al. 2025, arXiv 2501.01005).
"""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.kernels.attention.metadata import ITEM_FIELDS, DecodeWork, PagedMetadata

# A row is never cut further: its pieces are joined by one program.
MAX_PIECES = 64
# A shorter piece costs more in its start and its part of the joining than it gains.
MIN_PIECE = 64


def piece_length(lengths: np.ndarray, places: int) -> int:
    """Length to cut rows of ``lengths`` [R] to, for `places` pieces that run at the same time.

    Few rows become at most `places` pieces, as short as that allows; of many rows, only those longer than a place's
    share of the whole are cut.
    """
    lengths = np.maximum(lengths, 1)  # an empty row takes a place, too
    share = max(MIN_PIECE, -(-int(lengths.sum()) // places))
    if len(lengths) > places:
        return share
    low, high = share, max(share, int(lengths.max()))
    while low < high:
        middle = (low + high) // 2
        if int((-(-lengths // middle)).sum()) <= places:
            high = middle
        else:
            low = middle + 1
    return low


def num_items(num_rows: int, places: int) -> int:
    """Length of the plan of `num_rows` rows, whatever their lengths."""
    return places if num_rows <= places else num_rows + places


def plan_items(seq_lens: np.ndarray, slots: np.ndarray, places: int) -> np.ndarray:
    """Cut R rows into pieces of about equal length, longest first; int32 [num_items, ITEM_FIELDS], unused rows -1.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        places: pieces of one KV head that run at the same time.
    """
    lengths = seq_lens.astype(np.int64)
    pieces = np.clip(-(-lengths // piece_length(lengths, places)), 1, MAX_PIECES)
    order = np.argsort(lengths // -pieces, kind="stable")
    counts = pieces[order]
    row = np.repeat(order, counts)
    items = np.full((num_items(len(lengths), places), ITEM_FIELDS), -1, dtype=np.int32)
    used = items[: len(row)]
    used[:, 0] = row
    used[:, 1] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    used[:, 2] = pieces[row]
    used[:, 3] = lengths[row]
    used[:, 4] = slots[row]
    return items


def even_work(meta: PagedMetadata, num_kv_heads: int, pieces: int) -> DecodeWork:
    """Every row cut alike, for callers without a plan; made on the device, without waiting for it."""
    device = meta.seq_lens.device
    num_rows = meta.seq_lens.numel()
    row = torch.arange(num_rows, device=device, dtype=torch.int32).repeat_interleave(pieces)
    piece = torch.arange(pieces, device=device, dtype=torch.int32).repeat(num_rows)
    items = torch.stack([row, piece, torch.full_like(row, pieces), meta.seq_lens.repeat_interleave(pieces),
                         meta.slots.repeat_interleave(pieces)], dim=1)  # fmt: skip
    return DecodeWork(items, torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device))
