"""Check: ragged prompts, in one or two chunks, and decode rows in any order get the logits of stock's `generate`."""

from __future__ import annotations

import torch

from hf_paged.guards.snapshot import KEPT_BY_GENERATE
from hf_paged.models.proof.packed import PackedSteps
from hf_paged.models.proof.stock import Generated, generate
from hf_paged.models.proof.subject import TOLERANCE, Subject, distance
from hf_paged.models.proof.verdict import Refused

NEW_TOKENS = 4
_FAR = 1_000_000  # a distance of positions that would show
_FIRST_CHUNKS = (1, 5, 8, 20, 50)  # of each prompt: two are whole
_SECOND_ORDER = (3, 1, 4, 2, 0)
_DECODE_ROWS = ((2, 0, 4, 3, 1), (1, 3), (0, 1, 2, 3, 4), (4, 2))


def generated_by_stock(subject: Subject) -> Generated:
    """Generate from all prompts, left-padded; raises `Refused` for a cache with more than keys and values."""
    made = generate(subject.model, subject.prompts, NEW_TOKENS)
    kinds = sorted({type(layer).__name__ for layer in getattr(made.cache, "layers", ())})
    if any(("Linear" in kind and not subject.states) or "Indexed" in kind for kind in kinds):
        raise Refused(f"the cache holds a state beside keys and values ({', '.join(kinds)})")
    for module in subject.model.modules():
        if KEPT_BY_GENERATE in vars(module):  # of another call's images: packed steps must not read it
            setattr(module, KEPT_BY_GENERATE, torch.full((1, 1), _FAR))
    return made


def check_prompts(subject: Subject, made: Generated) -> None:
    """Raise `Refused` where packed steps, fed with stock's tokens, part from stock's logits."""
    rows = _Rows(subject, made)
    rows.step(dict(enumerate(_FIRST_CHUNKS)))
    rows.step({row: len(subject.prompts[row]) - _FIRST_CHUNKS[row] or 1 for row in _SECOND_ORDER})
    for order in _DECODE_ROWS:
        left = {row: 1 for row in order if rows.done[row] < len(subject.prompts[row]) + NEW_TOKENS - 1}
        if left:
            rows.step(left)
    if rows.worst >= TOLERANCE:
        raise Refused(f"packed logits differ from those of stock's generate by {rows.worst:.1e} of their standard "
                      "deviation")


class _Rows:
    """All rows' tokens, of which each step computes some more."""

    def __init__(self, subject: Subject, made: Generated) -> None:
        self._subject, self._made = subject, made
        self._tokens = [prompt + new[:-1] for prompt, new in zip(subject.prompts, made.tokens, strict=True)]
        self._steps: PackedSteps = subject.steps()
        self.done = [0] * len(self._tokens)
        self.worst = 0.0

    def step(self, counts: dict[int, int]) -> None:
        """Compute so many more tokens of each row, in this order of rows, and compare their logits."""
        got = self._steps.step([(row, self._tokens[row][self.done[row]:][:count]) for row, count in counts.items()])
        for row, count in counts.items():
            first, self.done[row] = self.done[row], self.done[row] + count
            prompt = len(self._subject.prompts[row])
            alone = self._subject.alone[row][first : self.done[row]]
            self.worst = max(self.worst, distance(got[row][: len(alone)], alone) if len(alone) else 0.0)
            if self.done[row] >= prompt:
                wanted = self._made.logits[row, self.done[row] - prompt]
                self.worst = max(self.worst, distance(got[row][-1], wanted))
