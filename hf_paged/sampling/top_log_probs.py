"""The likeliest tokens of a row with their log-probabilities, under the distributions of `token_log_probs`.

Uses torch and one kernel without reading values on the host, so that a CUDA graph can hold it. Runs only in steps with
a request for these log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hf_paged.sampling.edit_reference import EditTable
from hf_paged.sampling.edit_warpers import WARPERS, cut_off, warped_scores
from hf_paged.sampling.sampler import SamplingRows
from hf_paged.sampling.token_log_probs import LOGPROBS, PROCESSED, token_log_probs

# A stage of `RequestState.stages`: a row uses top-k, top-p or min-p, and a later stage has to know.
FILTERS = "filters"
MOST_TOP = 128
# Numbers of tokens to return, rounded up to one of these, since each width has its own graphs.
_WIDTHS = (8, 32, MOST_TOP)
_ROWS_AT_ONCE = 64  # bounds the memory of sorting rows, as in `edit_warpers`


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
        part = SamplingRows(*(column[some] for column in rows))
        kept = _kept(scores[some], part, stages, table, None if slots is None else slots[some])
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
        filters = table.typical_p[slots], table.epsilon_cutoff[slots], table.eta_cutoff[slots]
        warps = rows.drawn & ((filters[0] < 1.0) | (filters[1] > 0.0) | (filters[2] > 0.0))
        kept = cut_off(filtered, *filters).where(warps[:, None], kept)
    return kept


def with_eos_barred(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return ``logits`` [R, V] in float32, with EOS at -inf below the minimum length; does not wait for the device."""
    vocab_size = logits.shape[1]
    barred = (rows.position < rows.min_length)[:, None] & (rows.eos >= 0) & (rows.eos < vocab_size)
    wide = torch.nn.functional.pad(logits.float(), (0, 1))
    return wide.scatter_(1, rows.eos.where(barred, vocab_size), -torch.inf)[:, :vocab_size]
