"""Checks of steps with states: chunks of a prompt against the whole prompt, and many decode rows at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_paged.models.proof.packed import BLOCK, RecurrentSteps
from hf_paged.models.proof.stock import forward
from hf_paged.models.proof.subject import TOLERANCE, Subject, distance
from hf_paged.models.proof.verdict import Refused

_LONGEST, _USUAL = 256, 64  # chunks of scans around which prompts are cut
ROWS = 53  # of a decode step: a prime number, which is the size of no other dim


def takes_chunks(subject: Subject) -> bool:
    """Return whether a prompt in chunks gets the logits of the whole one."""
    try:
        check_chunks(subject, [])
    except Refused:
        return False
    return True


def check_chunks(subject: Subject, lengths: Iterable[int]) -> None:
    """Raise `Refused` where a prompt in chunks, cut around chunks of scans, gets other logits than the whole one."""
    scan = max([length for length in lengths if length <= _LONGEST], default=_USUAL)
    count = 2 * scan + 37
    tokens = torch.randint(3, 120, (count,), generator=torch.Generator().manual_seed(6)).tolist()
    whole = forward(subject.model, tokens)
    for cuts in ([], [1], [scan], [scan - 1, scan + 1], [2, 5, scan + 9], [2 * scan, count - 1], [_USUAL, _USUAL + 1]):
        steps = subject.steps(count // BLOCK + 1)
        ends = [*cuts, count]
        parts = [steps.step([(0, tokens[first:end])])[0] for first, end in zip([0, *cuts], ends, strict=True)]
        if (worst := distance(torch.cat(parts), whole)) >= TOLERANCE:
            raise Refused(f"a prompt in chunks, cut at {cuts}, gets logits that differ from the whole one's by "
                          f"{worst:.1e} of their standard deviation")


def check_batch(subject: Subject) -> None:
    """Raise `Refused` if a decode step of many rows gives other logits than steps of one row each."""
    alone = decoding(subject)
    got = decoding(subject).step([(row, [row + 5]) for row in reversed(range(ROWS))])
    worst = max(distance(got[row], alone.step([(row, [row + 5])])[row]) for row in range(0, ROWS, 7))
    if worst >= TOLERANCE:
        raise Refused(f"a decode step of {ROWS} rows gets logits that differ from those of steps of one row by "
                      f"{worst:.1e} of their standard deviation")


def decoding(subject: Subject) -> RecurrentSteps:
    """Return steps in which `ROWS` rows are behind some tokens, with random keys, values and states."""
    steps, generator = subject.steps(ROWS), torch.Generator().manual_seed(8)
    assert isinstance(steps, RecurrentSteps)
    for row in range(ROWS):
        tokens = 1 + row % 5
        drawn = [torch.randn(tokens, call.key_heads, size, generator=generator).double()
                 for call in subject.calls for size in (call.key_size, call.value_size)]
        steps.fill(row, tokens, drawn[::2], drawn[1::2])
        steps.fill_states(row, {key: torch.randn(state.shape, generator=generator).to(state.dtype)
                                for key, state in subject.states.items()})
    return steps
