"""Log-probabilities of a step's prompt tokens: the head over every position, a bounded number of them at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.models import ModelExecutor
from hf_paged.sampling.top_log_probs import top_log_probs

# Positions whose logits exist at the same time: this many, and less where that many numbers would be passed.
_MOST_POSITIONS = 1024
_MOST_LOGITS = 1 << 24


class PromptSpan(NamedTuple):
    """``length`` prompt tokens whose predecessors a row of a step computes; the first stands at ``first``."""

    row: int
    first: int
    length: int


class Wanted(NamedTuple):
    """Log-probabilities that a step has to bring: for its sampled tokens what `LOGPROBS` and `TOPS` name, and of these
    prompt tokens, with the likeliest in their places by a name of `TOPS`."""

    sampled: tuple[str, ...] = ()
    prompt: tuple[PromptSpan, ...] = ()
    prompt_top: str | None = None


NOTHING = Wanted()


def prompt_log_probs(executor: ModelExecutor, hidden: torch.Tensor, at: torch.Tensor,
                     token_ids: torch.Tensor, adapters: torch.Tensor | None = None,
                     tops: torch.Tensor | None = None) -> torch.Tensor:
    """log p of ``token_ids`` [N] int64, each from the raw logits of its row ``at`` [N] int64 of ``hidden`` [T, size].

    ``adapters`` [T]: as `StepContext.adapters`. ``tops`` [N, 2, width] receives the likeliest (see `Top`). float32 [N],
    as log_softmax in float32. Of the logits at most `_MOST_LOGITS` numbers exist at a time.
    """
    size = max(1, min(_MOST_POSITIONS, _MOST_LOGITS // executor.vocab_size))
    known = torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(token_ids), size):
        part = slice(start, start + size)
        some, ids, out = at[part], token_ids[part], known[part]
        scores = executor.logits(hidden[some], None if adapters is None else adapters[some])
        if tops is not None:
            top_log_probs(scores, tops[part])
        scores = scores.float()
        scores -= scores.amax(dim=-1, keepdim=True)
        chosen = scores.gather(1, ids[:, None])[:, 0]
        torch.sub(chosen, scores.exp_().sum(dim=-1).log_(), out=out)
    return known
