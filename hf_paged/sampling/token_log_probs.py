# mypy: disallow-untyped-defs=False
"""Log-probabilities of sampled tokens under the model's own logits, before any processor; names of the kinds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl

# Under the distribution that a token was sampled from (`sample_tokens`, `sample_edited`); under the unprocessed logits.
PROCESSED, RAW = "processed", "raw"
LOGPROBS = (PROCESSED, RAW)
NO_LOG_PROBS: Mapping[str, torch.Tensor] = MappingProxyType({})

_TILE = 4096


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute float32 log-softmax of each row of the logits at its token.

    Args:
        logits: ``[R, V]``, bfloat16, float16 or float32; rows may be strided, the last dim is contiguous.
        tokens: ``[R]`` int64 in ``[-1, V)``, contiguous; -1 marks an invalid row.
        out: ``[R]`` float32, contiguous, receives the result: NaN for an invalid row, and if the row has a NaN or no
            finite score.

    Returns:
        ``out``.

    Raises:
        ValueError: If shapes, dtypes or strides are not as above.
    """
    _check(logits, tokens, out)
    run = token_log_probs_triton if logits.is_cuda else token_log_probs_reference
    return run(logits, tokens, out)


def token_log_probs_reference(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute :func:`token_log_probs` in plain torch."""
    known = logits.float().log_softmax(dim=-1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return out.copy_(known.masked_fill(tokens < 0, torch.nan))


@jit(varying_pointers=("tokens", "out"))
def _token_log_probs_kernel(logits, tokens, out, row_stride, vocab_size, TILE: tl.constexpr):
    """Compute a row per program in one pass; every lane keeps the maximum of its columns and the sum relative to it."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    logits += row * row_stride
    top, mass = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        score = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2((top - base) * 1.4426950408889634) + tl.exp2((score - base) * 1.4426950408889634)
        top = higher
    best = tl.max(top, 0)
    total = tl.sum(mass * tl.exp2((top - best) * 1.4426950408889634), 0)
    chosen = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
    known = (chosen - best) - tl.log(total)
    tl.store(out + row, tl.where(token < 0, float("nan"), known))


def token_log_probs_triton(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute :func:`token_log_probs` by one Triton launch."""
    require_triton()
    if len(tokens):
        with on_device_of(logits):
            _token_log_probs_kernel[(len(tokens),)](
                logits, tokens, out, logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8, enable_fp_fusion=False,
            )
    return out


def _check(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be [R, V], V > 0, bf16, fp16 or fp32, got {tuple(logits.shape)} {logits.dtype}")
    if logits.stride(1) != 1:
        raise ValueError(f"the last dim of logits must be contiguous: strides {logits.stride()}")
    for name, tensor, dtype in (("tokens", tokens, torch.int64), ("out", out, torch.float32)):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be [{len(logits)}] {dtype}, contiguous, got {tuple(tensor.shape)} {tensor.dtype}"
            )
