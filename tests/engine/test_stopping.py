"""What ends requests besides EOS and their length, rows of one criterion looked at together."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from hf_paged.engine.stopping import ended

BAD, STOP, PLAIN = 7, 8, 9


class Criterion:
    """Stops at one token, and raises at another, as stop strings do at an id that their tokenizer does not have."""

    def __call__(self, tails: torch.Tensor, scores: None) -> torch.Tensor:
        if (tails == BAD).any():
            raise KeyError(BAD)
        return tails[:, -1] == STOP


def request(name, criterion, key=0):
    rule = SimpleNamespace(strings=criterion, tail=deque(maxlen=4), is_late=lambda now: False)
    rule.push = lambda token: (rule.tail.append(token), (key, len(rule.tail)))[1]
    return SimpleNamespace(request_id=name, stop=rule)


@pytest.mark.parametrize("tokens", [(BAD, STOP, PLAIN), (STOP, PLAIN, BAD), (PLAIN, BAD, STOP)])
def test_a_criterion_that_raises_at_one_row_ends_that_row_alone(tokens):
    """The rows beside it are looked at all the same: one ends with its stop string, one goes on."""
    criterion, names = Criterion(), {BAD: "bad", STOP: "stops", PLAIN: "goes on"}
    result = ended([(request(names[token], criterion), token) for token in tokens])
    assert set(result) == {"bad", "stops"}
    assert result["stops"] == "stop" and isinstance(result["bad"], KeyError)
