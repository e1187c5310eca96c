"""Draft tokens (guesses at a sequence's next tokens): the rows that compute them, and which of the rows count."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

import numpy as np

from hf_paged.scheduler.plan import StepPlan

# Tokens by slot that may follow the last known token of the slot's sequence.
Drafts = Mapping[int, Seq[int]]
NO_DRAFTS: Drafts = MappingProxyType({})

# Maximum of decode rows in a step with drafts, the rows of drafts included.
MOST_GUESSING_ROWS = 128


def guessing_rows(slots: np.ndarray, start: np.ndarray, guesses: list[Seq[int]],
                  copies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `slots`, `start` and `drafts` of a `StepPlan`, with a row for each draft after the row that it follows.

    Args:
        slots: [n] slots of the decode rows.
        start: [n] position of each row's known token.
        guesses: Drafts of each row.
        copies: [n] rows that replace each row: one, plus one per draft.
    """
    ends = np.cumsum(copies)
    positions = np.repeat(start - ends + copies, copies) + np.arange(ends[-1])
    drafts = [token for tokens in guesses for token in (-1, *tokens)]
    return np.repeat(slots, copies), positions.astype(np.int32), np.array(drafts, np.int32)


def confirmed(plan: StepPlan, tokens: np.ndarray, last: Container[int] = ()) -> np.ndarray:
    """Return which rows count, bool [R]: their input token is known or was sampled as guessed, before any end.

    Args:
        last: Rows whose token ends their sequence, besides rows that sampled an EOS token.
    """
    assert plan.drafts is not None
    found = plan.drafts < 0
    for row in np.flatnonzero(~found).tolist():
        before = int(tokens[row - 1])
        right = found[row - 1] and before == plan.drafts[row] and row - 1 not in last
        found[row] = right and before not in plan.sequences[row].eos_token_ids
    return found
