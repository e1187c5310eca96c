"""Selection of the best completions of a prompt, by the log-probability of the whole output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from hf_paged.config import require_int
from hf_paged.options.arguments import MOST_COPIES
from hf_paged.options.settings import RequestSettings
from hf_paged.outputs import StepOutput


def best_outputs(asked: Sequence[tuple[int, object, int | None]], made: list[StepOutput]) -> list[StepOutput]:
    """Return the requested number of each prompt's candidates, best first by `Completion.cumulative_logprob`.

    A candidate that failed, or whose log-probabilities are unknown, comes after the others.

    Args:
        asked: The `PlannedCompletion` of each completion, grouped by prompt.
        made: The last outputs, with the completions.
    """
    chosen: list[StepOutput] = []
    for _, group in groupby(zip(asked, made, strict=True), key=lambda one: one[0][0]):
        candidates = list(group)
        (_, _, best), _ = candidates[0]
        outputs = [output for _, output in candidates]
        chosen += outputs if best is None else sorted(outputs, key=_rank)[:best]  # stable
    return chosen


def _rank(output: StepOutput) -> tuple[bool, float]:
    completion = output.completion
    assert completion is not None
    known = completion.cumulative_logprob
    ended_early = completion.finish_reason in ("error", "abort", "timeout")
    return ended_early or known is None, 0.0 if known is None else -known


def num_candidates(best_of: Any, wanted: int, settings: RequestSettings) -> int:
    """Return the number of candidates for ``wanted`` completions; a ValueError or TypeError names `best_of`."""
    require_int("best_of", best_of, 1)
    if not wanted <= best_of <= MOST_COPIES:
        raise ValueError(f"best_of={best_of!r}: expected at least num_return_sequences={wanted}, at most {MOST_COPIES}")
    if best_of > 1 and not settings.do_sample:
        raise ValueError(f"best_of={best_of!r}: expected 1, or more with do_sample=True")
    return best_of
