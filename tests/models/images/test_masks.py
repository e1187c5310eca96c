"""Masks of a model's own code as the positions that each token sees."""

from __future__ import annotations

import torch

from hf_paged.errors import Reason
from hf_paged.models.base import AttentionMask
from hf_paged.models.images.fed_prompt import plain_sight
from hf_paged.models.images.masks import sights_of

T = 9
FULL, SLIDING = AttentionMask(None), AttentionMask(4)


def causal(window: int | None = None) -> torch.Tensor:
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)


def rows(*masks: torch.Tensor) -> torch.Tensor:
    return torch.stack(masks)[:, None]


def test_plain_masks_say_nothing():
    padding = torch.ones(2, T, dtype=torch.int64)
    kinds = {"full_attention": rows(causal()), "sliding_attention": rows(causal(4), causal(4))}
    for given in (None, padding, kinds, dict.fromkeys(kinds)):
        assert sights_of(given, [T, T], [FULL, SLIDING]) == [{}, {}]
    added = torch.zeros(T, T).masked_fill(~causal(), torch.finfo(torch.float32).min)
    assert sights_of(rows(added), [T, 3], [FULL]) == [{}, {}]


def test_a_span_of_one_row_behind_padding():
    mask = causal(4)
    mask[5:8, 5:8] = True
    [none, found] = sights_of({"sliding_attention": rows(causal(4), mask), "full_attention": None}, [T, 7],
                              [SLIDING, FULL])
    assert none == {} and found.keys() == {4}
    expected = plain_sight(7, 4)
    expected[1, 3:6] = 5
    assert found[4].tolist() == expected.tolist()


def test_what_no_interval_says_is_refused():
    holes, other = causal(), causal(5)
    holes[7, 3] = False
    for given, masks in ((rows(holes), [FULL]), (rows(causal()), [FULL, SLIDING]), (object(), [FULL]),
                         (rows(causal()), [AttentionMask(None, 4)]), (rows(causal())[0], [FULL])):
        assert isinstance(sights_of(given, [T], masks), Reason)
    assert sights_of(rows(other), [T], [SLIDING])[0][4][0].tolist() == plain_sight(T, 5)[0].tolist()


def test_tokens_that_see_nothing_are_refused():
    blind = causal()
    blind[6] = False
    assert isinstance(sights_of(rows(blind), [T], [FULL]), Reason)
