# mypy: disallow-untyped-defs=False
"""Log-probabilities of tokens: of the sampled ones, and of a row's likeliest ones.

They are under the distribution that a token was sampled from ("processed"), or under the model's own logits before any
processor ("raw"). No value is read on the host, so that a CUDA graph can hold all of it; the likeliest tokens are only
computed in steps with a request for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from hf_paged.kernels._checks import Expected, check_logits, check_tensors
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl
from hf_paged.sampling.edit_reference import WARPERS, EditTable, cut_off, warpers_of
from hf_paged.sampling.sampler import SamplingRows, warped_scores

# Under the distribution that a token was sampled from (`sample_tokens`, `sample_edited`); under the unprocessed logits.
PROCESSED, RAW = "processed", "raw"
LOGPROBS = (PROCESSED, RAW)
NO_LOG_PROBS: Mapping[str, torch.Tensor] = MappingProxyType({})

_TILE = 4096
# A stage of `RequestState.stages`: a row uses top-k, top-p or min-p, and a later stage has to know.
FILTERS = "filters"
MOST_TOP = 128
# Numbers of tokens to return, rounded up to one of these, since each width has its own graphs.
_WIDTHS = (8, 32, MOST_TOP)
_ROWS_AT_ONCE = 64  # bounds the memory of sorting rows, as in `draw_warped`


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
    check_logits(logits)
    check_tensors(
        Expected("tokens", tokens, (len(logits),), torch.int64, contiguous=True),
        Expected("out", out, (len(logits),), torch.float32, contiguous=True),
    )
    run = token_log_probs_triton if logits.is_cuda else token_log_probs_reference
    return run(logits, tokens, out)


def token_log_probs_reference(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
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
    require_triton()
    if len(tokens):
        with on_device_of(logits):
            _token_log_probs_kernel[(len(tokens),)](
                logits, tokens, out, logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8, enable_fp_fusion=False,
            )
    return out


class Top(NamedTuple):
    """``width`` tokens under one of `LOGPROBS`: [R, 2, width] float32, with log-probabilities [:, 0] and ids [:, 1].

    The likeliest come first. Ids are whole numbers below 2**24, which float32 holds exactly; if the vocabulary is
    smaller than ``width``, the remaining log-probabilities are -inf.
    """

    kind: str
    width: int


# Names of results of a step, beside the names of `LOGPROBS`.
TOPS: Mapping[str, Top] = {f"{kind} top {width}": Top(kind, width) for kind in LOGPROBS for width in _WIDTHS}


def top_name(kind: str, count: int) -> str:
    """Return the name in `TOPS` for ``count`` tokens, at most `MOST_TOP`."""
    width = next(width for width in _WIDTHS if width >= count)
    return f"{kind} top {width}"


def shape_of(name: str, num_rows: int) -> tuple[int, ...]:
    """Return the shape of a step's result with a name of `LOGPROBS` or `TOPS`."""
    return (num_rows, 2, TOPS[name].width) if name in TOPS else (num_rows,)


def top_log_probs(scores: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the best tokens of each row of ``scores`` [R, V], any float dtype, to ``out`` [R, 2, width] (see `Top`).

    Log-probabilities are log-softmax in float32; NaN where `token_log_probs` gives NaN. The order and choice of tokens
    with equal scores are unspecified.
    """
    count = min(out.shape[2], scores.shape[1])
    values, ids = scores.topk(count, dim=-1)
    best = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    token_log_probs(scores, ids[:, 0].contiguous(), best)
    out[:, 0, count:], out[:, 1, count:] = -torch.inf, 0.0
    out[:, 0, :count] = values.float() - values[:, :1].float() + best[:, None]
    out[:, 1, :count] = ids.float()
    return out


def top_processed(
    scores: torch.Tensor, rows: SamplingRows, stages: frozenset[str], outs: Mapping[str, torch.Tensor],
    table: EditTable | None = None, slots: torch.Tensor | None = None,
) -> None:
    """Write the best tokens under each row's sampling distribution to ``outs``, by their names in `TOPS`.

    Args:
        scores: float32 [R, V], edited, and with EOS barred; not changed.
        rows: Settings of the rows.
        stages: `FILTERS` if a row may have top-k, top-p or min-p, and the names of `WARPERS` that a row may have.
        outs: Tensors of kind "processed"; other names are ignored.
        table, slots: Edits of the rows, needed with `WARPERS`.
    """
    wanted = [out for name, out in outs.items() if name in TOPS and TOPS[name].kind == PROCESSED]
    if not wanted:
        return
    for start in range(0, len(scores), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        kept = _kept(scores[some], rows.at(some), stages, table, None if slots is None else slots[some])
        for out in wanted:
            top_log_probs(kept, out[some])


def _kept(scores: torch.Tensor, rows: SamplingRows, stages: frozenset[str], table: EditTable | None,
          slots: torch.Tensor | None) -> torch.Tensor:
    """Return scores whose softmax a row's token is sampled from; unfiltered for a greedy row."""
    drawn = rows._replace(temperature=rows.temperature.where(rows.drawn, 1.0))
    scaled = scores / drawn.temperature[:, None]
    if not stages & {FILTERS, *WARPERS}:
        return scaled
    filtered = warped_scores(scores, drawn)
    kept = filtered.where(rows.filtered[:, None], scaled)
    if stages & WARPERS:
        assert table is not None and slots is not None
        filters, warps = warpers_of(rows, table, slots)
        kept = cut_off(filtered, *filters).where(warps[:, None], kept)
    return kept


def with_eos_barred(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return ``logits`` [R, V] in float32, with EOS at -inf below the minimum length; does not wait for the device."""
    vocab_size = logits.shape[1]
    barred = (rows.position < rows.min_length)[:, None] & (rows.eos >= 0) & (rows.eos < vocab_size)
    wide = torch.nn.functional.pad(logits.float(), (0, 1))
    return wide.scatter_(1, rows.eos.where(barred, vocab_size), -torch.inf)[:, :vocab_size]
