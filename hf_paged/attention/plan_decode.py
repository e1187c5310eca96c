"""Plans of decode steps: rows are cut into splits of work, longest first, so that all multiprocessors end together.

The host knows every length before a step is launched, and plans it; the kernel's grid has a fixed number of items, and
a CUDA graph reads another plan at each replay, as in FlashInfer (Ye et al. 2025, arXiv 2501.01005).
"""

from __future__ import annotations

import numpy as np

from hf_paged.kernels.attention.decode import MAX_SPLITS, MIN_SPLIT
from hf_paged.kernels.attention.types import ITEM_FIELDS, WorkItem

# The cost of joining splits, in positions of the longest split, for as many rows of this length as there are CTA slots;
# it is scaled down for fewer rows, which read faster (docs/notebook.md, "Sixteen and 32 rows").
JOINING = 420


def split_length(lengths: np.ndarray, cta_slots: int) -> int:
    """Return the length to which rows of ``lengths`` [R] are cut, for `cta_slots` splits that run at the same time.

    Few rows become at most `cta_slots` splits, as short as that allows, or stay whole if joining splits would take
    longer than cutting saves; of many rows, only rows longer than a CTA slot's share of all positions are cut.
    """
    lengths = np.maximum(lengths, 1)  # an empty row takes a CTA slot, too
    share = max(MIN_SPLIT, -(-int(lengths.sum()) // cta_slots))
    if len(lengths) > cta_slots:
        return share
    low, high = share, max(share, int(lengths.max()))
    while low < high:
        middle = (low + high) // 2
        if int((-(-lengths // middle)).sum()) <= cta_slots:
            high = middle
        else:
            low = middle + 1
    longest = int(lengths.max())
    saved = longest - int((-(-lengths // num_splits(lengths, low))).max())
    sharing = lengths.sum() / longest  # rows of the longest's length that read as much
    return low if saved * cta_slots >= JOINING * sharing else longest


def num_splits(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return the number of splits of rows of ``lengths`` [R]: at most `longest` positions each, at most MAX_SPLITS."""
    return np.minimum(np.maximum(-(-lengths // longest), 1), MAX_SPLITS)  # np.clip takes twice as long


def num_items(num_rows: int, cta_slots: int) -> int:
    """Return the length of the plan of `num_rows` rows, the same for all lengths."""
    return cta_slots if num_rows <= cta_slots else num_rows + cta_slots


def plan_items(seq_lens: np.ndarray, slots: np.ndarray, cta_slots: int) -> np.ndarray:
    """Cut R rows into splits of about equal length, longest first; int32 [num_items, ITEM_FIELDS], unused rows -1.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        cta_slots: splits of one KV head that run at the same time.
    """
    lengths = seq_lens.astype(np.int64)
    splits = num_splits(lengths, split_length(lengths, cta_slots))
    order = np.argsort(lengths // -splits, kind="stable")
    counts = splits[order]
    row = np.repeat(order, counts)
    items = np.full((num_items(len(lengths), cta_slots), ITEM_FIELDS), -1, dtype=np.int32)
    split = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    used = WorkItem(row=row, split=split, num_splits=splits[row], length=lengths[row], slot=slots[row])
    for column, values in enumerate(used):
        items[: len(row), column] = values
    return items
