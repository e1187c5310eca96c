"""Checks: a row's logits do not depend on the other rows of a step, nor on how many tokens a step has."""

from __future__ import annotations

import torch
from torch import nn

from hf_paged.models.proof.interface import embeddings_of
from hf_paged.models.proof.packed import BLOCK, RecurrentSteps
from hf_paged.models.proof.subject import TOLERANCE, Subject, distance
from hf_paged.models.proof.verdict import Refused

# Token ids whose embeddings are made huge in one column, huge, and NaN.
_SPIKE, _HUGE, _NAN = 120, 121, 122
STEP_TOKENS = 8_200


def check_other_rows(subject: Subject, tolerance: float = TOLERANCE) -> float:
    """Raise `Refused` if a row's logits change with the tokens beside it; returns the largest change."""
    with_column = [_SPIKE, *subject.prompts[2][1:18], _HUGE]
    neighbours = (subject.prompts[2], subject.prompts[3][:19], [5] * 19, [_HUGE] * 19, [_SPIKE] * 19, with_column,
                  [_NAN] * 19)
    table = embeddings_of(subject.model)
    kept = table[_SPIKE : _NAN + 1].detach().clone()
    try:
        _plant(table)
        found = [_beside(subject, neighbour) for neighbour in neighbours]
    finally:
        with torch.no_grad():
            table[_SPIKE : _NAN + 1] = kept
    worst = max(distance(logits, found[0]) for logits in found[1:])
    if worst >= tolerance:
        raise Refused(f"a row's logits depend on the other rows of a step: they differ by {worst:.1e} of their "
                      "standard deviation")
    return worst


def _plant(table: nn.Parameter) -> None:
    with torch.no_grad():
        table[_HUGE] *= 1000
        table[_SPIKE] *= 0.01
        table[_SPIKE, 5] = 1000.0  # a norm leaves this column large
        table[_NAN] = float("nan")


def _beside(subject: Subject, neighbour: list[int]) -> torch.Tensor:
    """Return logits of two rows beside a third one, in its prefill and behind its first tokens, and with states also
    while all decode."""
    steps = subject.steps()
    steps.step([(0, subject.prompts[1][:3]), (1, neighbour[:4])])
    got = steps.step([(2, subject.prompts[3][:9]), (1, neighbour[4:]), (0, subject.prompts[1][3:])])
    logits = torch.cat([got[2], got[0]])
    if isinstance(steps, RecurrentSteps):
        for _ in range(2):
            got = steps.step([(2, [7]), (1, neighbour[-1:]), (0, [9])])
            logits = torch.cat([logits, got[2], got[0]])
        steps.end(1)
        logits = torch.cat([logits, steps.step([(3, subject.prompts[1])])[3]])  # in the slot of the row that ended
    # A head that shares the embeddings' weights has these columns changed.
    return torch.cat([logits[:, :_SPIKE], logits[:, _NAN + 1 :]], 1)


def check_crowd(subject: Subject, tokens: int = STEP_TOKENS) -> int:
    """Raise `Refused` if logits change in a step of so many tokens; returns their number."""
    fillers = [[(7 * row + at) % 110 + 3 for at in range(100)] for row in range((tokens - 38) // 100)]
    if rest := (tokens - 38) % 100:
        fillers.append([7] * rest)
    unread = frozenset(range(10, 10 + len(fillers)))
    steps = subject.steps(tokens // BLOCK + tokens // 90 + 40, unread)
    got = steps.step([*zip(sorted(unread), fillers, strict=True), (3, subject.prompts[3]), (1, subject.prompts[1])])
    worst = max(distance(got[row], subject.alone[row]) for row in (1, 3))
    if worst >= TOLERANCE:
        raise Refused(f"logits of a step of {tokens} tokens differ by {worst:.1e} of their standard deviation: a "
                      "module counts the tokens of a step")
    return tokens
