"""How the rows of a decode step are cut into pieces of work, longest first, so that all multiprocessors end together.

The host knows every length before a step is launched, so it plans; the kernel's grid has a fixed number of items, and a
CUDA graph reads another plan at every replay. Planning on the host as in FlashInfer (Ye et al. 2025, arXiv 2501.01005).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from hf_paged.kernels.metadata import ITEM_FIELDS, DecodeWork, PagedMetadata

# A row is never cut further: its pieces are joined by one program.
MAX_PIECES = 64
# A shorter piece costs more in its start and its part of the joining than it gains.
MIN_PIECE = 64
# Pieces are as long as the step's positions divided over this many programs a multiprocessor.
PROGRAMS_PER_SM = 4


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def most_items(num_rows: int, num_kv_heads: int, multiprocessors: int, programs_per_sm: float = PROGRAMS_PER_SM) -> int:
    """Upper bound of the items that `plan_items` makes of `num_rows` rows, whatever their lengths."""
    return num_rows + int(programs_per_sm * multiprocessors / num_kv_heads) + 1


def plan_items(seq_lens: np.ndarray, slots: np.ndarray, num_items: int, num_kv_heads: int, multiprocessors: int,
               programs_per_sm: float = PROGRAMS_PER_SM, min_piece: int = MIN_PIECE) -> np.ndarray:  # fmt: skip
    """Cut R rows into pieces of about equal length and order them by length; int32 [num_items, 5].

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        num_items: lines of the result, at least `most_items`; unused ones have row -1.
    """
    lengths = seq_lens.astype(np.int64)
    programs = programs_per_sm * multiprocessors / num_kv_heads
    piece = max(min_piece, int(lengths.sum() / programs) + 1)
    pieces = np.clip(-(-lengths // piece), 1, MAX_PIECES)
    order = np.argsort(lengths // -pieces, kind="stable")
    counts = pieces[order]
    row = np.repeat(order, counts)
    items = np.full((num_items, ITEM_FIELDS), -1, dtype=np.int32)
    used = items[: len(row)]
    used[:, 0] = row
    used[:, 1] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    used[:, 2] = pieces[row]
    used[:, 3] = lengths[row]
    used[:, 4] = slots[row]
    return items


def planned_work(seq_lens: np.ndarray, slots: np.ndarray, num_kv_heads: int, device: torch.device) -> DecodeWork:
    """The plan of one step on `device`, with counters of its own."""
    multiprocessors = num_multiprocessors(device)
    num_items = most_items(len(seq_lens), num_kv_heads, multiprocessors)
    items = torch.from_numpy(plan_items(seq_lens, slots, num_items, num_kv_heads, multiprocessors))
    if device.type == "cuda":
        items = items.pin_memory()
    arrivals = torch.zeros(len(seq_lens) * num_kv_heads, dtype=torch.int32, device=device)
    return DecodeWork(items.to(device, non_blocking=True), arrivals)


def even_pieces(num_rows: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Pieces per row, where nothing is known of the lengths, so that rows * heads * pieces fill the device."""
    wanted = round(PROGRAMS_PER_SM * multiprocessors / max(1, num_rows * num_kv_heads))
    return max(1, min(wanted, MAX_PIECES))


def even_work(meta: PagedMetadata, num_kv_heads: int, pieces: int) -> DecodeWork:
    """Every row cut alike, for callers without a plan; made on the device, without waiting for it."""
    device = meta.seq_lens.device
    num_rows = meta.seq_lens.numel()
    row = torch.arange(num_rows, device=device, dtype=torch.int32).repeat_interleave(pieces)
    piece = torch.arange(pieces, device=device, dtype=torch.int32).repeat(num_rows)
    items = torch.stack([row, piece, torch.full_like(row, pieces), meta.seq_lens.repeat_interleave(pieces),
                         meta.slots.repeat_interleave(pieces)], dim=1)  # fmt: skip
    return DecodeWork(items, torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device))
