"""What tests compare with: near ties of half precision may fall either way, and nothing else may differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support import LOGITS, assert_near, batch, same_but_for_near_ties, tiny_model

BRAIN, FULL = torch.bfloat16, torch.float32
# Of two rows of two prompt tokens and three steps; the second best of each step is a near tie in the second one alone.
TOKENS = torch.tensor([[7, 8, 0, 1, 2], [7, 8, 2, 1, 0]])
STEPS = (torch.tensor([[4.0, 1.0, 1.0], [1.0, 1.0, 4.0]]), torch.tensor([[1.0, 4.0, 3.9], [3.9, 4.0, -torch.inf]]),
         torch.tensor([[1.0, 1.0, 4.0], [4.0, 3.0, 1.0]]))
STOCK = SimpleNamespace(sequences=TOKENS, logits=STEPS)


@pytest.mark.parametrize(("changes", "precision", "same"), [
    ({}, FULL, True),
    ({(0, 3): 2}, BRAIN, True),
    ({(0, 3): 2, (0, 4): 0, (1, 3): 0, (1, 4): 2}, BRAIN, True),  # behind a tie there is nothing to compare
    ({(0, 3): 2}, FULL, False),
    ({(0, 3): 0}, BRAIN, False),
    ({(1, 3): 2}, BRAIN, False),  # forbidden
    ({(0, 2): 1}, BRAIN, False),
    ({(1, 4): 1}, BRAIN, False),
    ({(0, 1): 7}, BRAIN, False),  # another prompt
    ({(0, 3): 2, (1, 4): 1}, BRAIN, False),  # each row for itself
])
def test_what_may_differ(changes, precision, same):
    tokens = TOKENS.clone()
    for place, token in changes.items():
        tokens[place] = token
    assert same_but_for_near_ties(tokens, STOCK, precision) is same


def test_other_shapes_and_types_differ():
    assert not same_but_for_near_ties(TOKENS[:, :4], STOCK)
    assert not same_but_for_near_ties(TOKENS.int(), STOCK)


def test_what_stocks_generate_returns_is_compared():
    inputs = batch([9, 4])
    stock = tiny_model().generate(**inputs, max_new_tokens=4, **LOGITS)
    assert same_but_for_near_ties(stock.sequences.clone(), stock, FULL)
    assert not same_but_for_near_ties(tiny_model(seed=1).generate(**inputs, max_new_tokens=4), stock)


def test_near_by_all_differences_together():
    expected = torch.tensor([3.0, 4.0, -torch.inf])
    assert_near(torch.tensor([3.0, 4.2, -torch.inf]), expected, 0.05)
    with pytest.raises(AssertionError, match=r"0\.08"):
        assert_near(torch.tensor([3.0, 4.4, -torch.inf]), expected, 0.05)
    with pytest.raises(AssertionError):
        assert_near(torch.tensor([3.0, 4.0, 0.0]), expected, 0.05)
