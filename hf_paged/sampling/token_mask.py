# mypy: disallow-untyped-defs=False
"""Barring of tokens by bit masks from the host: in rows with a mask, logits whose bit is 0 become -inf.

A mask has a bit per token of the whole vocabulary, lowest bit of a word first, as in xgrammar and llguidance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton

_TILE = 4096


class TokenMasks(NamedTuple):
    """Masks of some rows. ``words`` [M, W] int32, bit ``token % 32`` of word ``token // 32`` is 1 for an allowed token;
    ``lines`` [R] int32: each row's line of ``words``, or -1 for a row without a mask. Both on the logits' device.
    """

    words: torch.Tensor
    lines: torch.Tensor

    def of(self, rows: slice, padding: int = 0) -> TokenMasks:
        """Return the masks of a slice of the rows, after ``padding`` rows without a mask were appended."""
        return self._replace(lines=torch.nn.functional.pad(self.lines, (0, padding), value=-1)[rows])


class HostMasks(NamedTuple):
    """`TokenMasks` on the host: ``words`` in memory that is pinned for a GPU, and ``lines`` [R] int32."""

    words: torch.Tensor
    lines: np.ndarray

    def to(self, device: torch.device) -> TokenMasks:
        """Copy to the logits' device without waiting; on a CPU ``words`` share their memory."""
        return TokenMasks(self.words.to(device, non_blocking=True), upload(self.lines, device))


def mask_tokens(logits: torch.Tensor, masks: TokenMasks, first: int = 0) -> torch.Tensor:
    """Set logits to -inf in place where a row's mask has a 0.

    Args:
        logits: ``[R, n]``, bfloat16, float16 or float32, the last dim contiguous; rows may be strided.
        masks: Masks of the R rows. Tokens beyond the last word are barred.
        first: Token of the first column, for a rank with a part of the vocabulary; need not be a multiple of 32.

    Returns:
        ``logits``.

    Raises:
        ValueError: If shapes, dtypes or strides are not as above.
    """
    words, lines = masks
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(f"logits must be [R, n] of floats, the last dim contiguous, got {tuple(logits.shape)} "
                         f"{logits.dtype}")
    if words.dim() != 2 or words.dtype != torch.int32 or not words.is_contiguous():
        raise ValueError(f"words must be [M, W] int32, contiguous, got {tuple(words.shape)} {words.dtype}")
    if lines.shape != logits.shape[:1] or lines.dtype != torch.int32 or not lines.is_contiguous():
        raise ValueError(f"lines must be [{len(logits)}] int32, contiguous, got {tuple(lines.shape)} {lines.dtype}")
    run = mask_tokens_triton if logits.is_cuda else mask_tokens_reference
    return run(logits, masks, first)


def mask_tokens_reference(logits: torch.Tensor, masks: TokenMasks, first: int = 0) -> torch.Tensor:
    words, lines = masks
    rows = (lines >= 0).nonzero().flatten()
    if not len(rows):
        return logits
    bits = words[lines[rows].long(), :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    allowed = bits.flatten(1)[:, first : first + logits.shape[1]].bool()
    missing = logits.shape[1] - allowed.shape[1]
    barred = ~torch.nn.functional.pad(allowed, (0, missing))
    logits[rows] = logits[rows].masked_fill(barred, -torch.inf)
    return logits


@jit(varying_ints=("first", "num_words"), varying_pointers=("words", "lines"))
def _mask_tokens_kernel(logits, words, lines, row_stride, width, num_words, first, TILE: tl.constexpr):
    """Mask a tile of columns of a row per program; skips rows without a mask."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row).to(tl.int64)
    if line >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        token = first + column
        word = tl.load(words + line * num_words + token // 32, mask=token // 32 < num_words, other=0)
        is_barred = ((word >> (token % 32)) & 1) == 0
        barred = tl.full([TILE], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * row_stride + column, barred, mask=is_barred & (column < width))


def mask_tokens_triton(logits: torch.Tensor, masks: TokenMasks, first: int = 0) -> torch.Tensor:
    """Compute :func:`mask_tokens` by a kernel that reads one word per 32 logits and writes only barred logits."""
    require_triton()
    num_rows, width = logits.shape
    if num_rows and width:
        with on_device_of(logits):
            _mask_tokens_kernel[(num_rows, triton.cdiv(width, _TILE))](
                logits, masks.words, masks.lines, logits.stride(0), width, masks.words.shape[1], first, TILE=_TILE
            )
    return logits
