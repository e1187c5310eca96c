# mypy: disallow-untyped-defs=False
"""What the kernels of LoRA have in common: products as exact as PEFT's, and how adapters are found.

A kernel reads its table before `after_previous_kernel`: the table was written by a copy, and kernels behind a copy are
not put on the machine before it is done. What it points to, trained by kernels, is only prefetched there.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import jit, pdl_options, tl, triton
from hf_paged.kernels.lora_order import RowOrder
from hf_paged.kernels.lora_table import LoraTable

FIELDS = 5 if tl is None else tl.constexpr(5)  # int64 values of an adapter in the table
_KINDS = {} if tl is None else {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@jit()
def lora_dot(x, weight, acc, LOW: tl.constexpr, PRECISION: tl.constexpr, X_IS_EXACT: tl.constexpr):
    """acc + x @ weight, of float32 values unless LOW.

    PRECISION "bf16x3": values as sums of three bfloat16 (X_IS_EXACT: of x one is enough), whose products tensor cores
    add up in float32; terms below 2**-24 are left out. Else what `tl.dot` calls so.
    """
    if LOW:
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    elif PRECISION == "bf16x3":
        w_high = weight.to(tl.bfloat16)
        rest = weight - w_high.to(tl.float32)
        w_middle = rest.to(tl.bfloat16)
        w_low = (rest - w_middle.to(tl.float32)).to(tl.bfloat16)
        if X_IS_EXACT:
            acc = tl.dot(x, w_low, acc)
            acc = tl.dot(x, w_middle, acc)
            acc = tl.dot(x, w_high, acc)
        else:
            x_high = x.to(tl.bfloat16)
            x_rest = x - x_high.to(tl.float32)
            x_middle = x_rest.to(tl.bfloat16)
            x_low = (x_rest - x_middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x_low, w_high, acc)
            acc = tl.dot(x_middle, w_middle, acc)
            acc = tl.dot(x_high, w_low, acc)
            acc = tl.dot(x_middle, w_high, acc)
            acc = tl.dot(x_high, w_middle, acc)
            acc = tl.dot(x_high, w_high, acc)
    else:
        acc = tl.dot(x.to(tl.float32), weight, acc, input_precision=PRECISION)
    return acc


@jit()
def rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row numbers of a program's tile, which of them there are, and the entry of them all, -1: none.

    Without HAS_ROWS they lie side by side and have the first entry; else see `RowOrder`.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_rows
    entry = 0
    if HAS_ROWS:
        row = tl.load(rows + row)
        inside = row >= 0
        entry = tl.load(tile_entries + tl.program_id(0))
    return row, inside, entry


@jit()
def pointer_to(address, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses out of the table as pointers to `kind`."""
    pointer = address.to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def precision_of(dtype: torch.dtype) -> str:
    """How float32 adapters are multiplied with inputs of a type: what is fastest on an H200 and exact enough."""
    return "bf16x3" if dtype == torch.bfloat16 else "tf32x3"


def table_options(table: LoraTable, x: torch.Tensor, precision: str) -> dict:
    """Launch arguments that both kernels have."""
    low = table.compute_dtype != torch.float32
    return {
        "PARTS": table.num_parts, "MEMBERS": table.num_members, "RANK": table.rank,
        "KIND": _KINDS[table.dtype], "COMPUTE": _KINDS[table.compute_dtype], "LOW": low,
        "PRECISION": precision, "ALIGNED": table.aligned, **pdl_options(x),
    }


def tiles_of_rows(num_rows: int, block_m: int, order: RowOrder | None) -> tuple[int, dict]:
    """How many tiles of rows there are, and the launch arguments of `rows_of_tile`."""
    if order is None:
        return triton.cdiv(num_rows, block_m), {"rows": None, "tile_entries": None, "HAS_ROWS": False,
                                                "BLOCK_M": block_m}
    return len(order.rows), {"rows": order.rows, "tile_entries": order.tile_entries, "HAS_ROWS": True,
                             "BLOCK_M": order.tile}
