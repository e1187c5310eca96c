"""Log-probabilities of a step's prompt tokens, with the logits of a bounded number of positions at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.models import ModelExecutor
from hf_paged.sampling.log_probs import top_log_probs

# Maximum of positions whose logits exist at the same time, and of numbers in these logits.
_MOST_POSITIONS = 1024
_MOST_LOGITS = 1 << 24


class PromptSpan(NamedTuple):
    """``length`` prompt tokens, the first at position ``first``, whose predecessors are tokens of one row of a step."""

    row: int
    first: int
    length: int


class Wanted(NamedTuple):
    """Log-probabilities that a step has to return: names of `LOGPROBS` and `TOPS` for its sampled tokens, prompt tokens
    to score, and a name of `TOPS` for the likeliest tokens at their positions."""

    sampled: tuple[str, ...] = ()
    prompt: tuple[PromptSpan, ...] = ()
    prompt_top: str | None = None


NOTHING = Wanted()


def prompt_log_probs(executor: ModelExecutor, hidden: torch.Tensor, at: torch.Tensor,
                     token_ids: torch.Tensor, adapters: torch.Tensor | None = None,
                     tops: torch.Tensor | None = None) -> torch.Tensor:
    """Return log p of ``token_ids`` [N] int64, from the raw logits of rows ``at`` [N] int64 of ``hidden`` [T, size].

    ``adapters`` [T]: as `StepContext.adapters`. ``tops`` [N, 2, width] receives the likeliest tokens (see `Top`). The
    result is float32 [N], as log_softmax in float32. At most `_MOST_LOGITS` numbers of logits exist at a time.
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
