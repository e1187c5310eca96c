"""Guesses at what follows in sequences: the rows of a step that compute them, and which of these count."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

import numpy as np

from hf_paged.scheduler.plan import StepPlan

# By slot: tokens that may follow the last known one of its sequence.
Drafts = Mapping[int, Seq[int]]
NO_DRAFTS: Drafts = MappingProxyType({})

# Decode rows of a step with guesses, these included.
MOST_GUESSING_ROWS = 128


def guessing_rows(slots: np.ndarray, start: np.ndarray, guesses: list[Seq[int]],
                  copies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`slots`, `start` and `drafts` of a `StepPlan` in which a row for each guess stands behind the row it is made for.

    Args:
        slots: [n] of the decode rows.
        start: [n] position of each one's known token.
        guesses: Of each row.
        copies: [n] rows that there are in place of each one: a guess more than it has.
    """
    ends = np.cumsum(copies)
    positions = np.repeat(start - ends + copies, copies) + np.arange(ends[-1])
    drafts = [token for tokens in guesses for token in (-1, *tokens)]
    return np.repeat(slots, copies), positions.astype(np.int32), np.array(drafts, np.int32)


def confirmed(plan: StepPlan, tokens: np.ndarray, last: Container[int] = ()) -> np.ndarray:
    """bool [R]: rows of a plan with drafts whose token of input turned out to be right, and no end before it.

    Args:
        last: Rows whose token ends their sequence, besides those with one of its EOS tokens.
    """
    assert plan.drafts is not None
    found = plan.drafts < 0
    for row in np.flatnonzero(~found).tolist():
        before = int(tokens[row - 1])
        right = found[row - 1] and before == plan.drafts[row] and row - 1 not in last
        found[row] = right and before not in plan.sequences[row].eos_token_ids
    return found
