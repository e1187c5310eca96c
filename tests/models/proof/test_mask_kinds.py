"""A mask is known by what its function lets positions see."""

from __future__ import annotations

import pytest
import torch

from hf_paged.models.proof.mask_kinds import FULL, MaskKind, mask_kind
from hf_paged.models.proof.verdict import Refused


def full(batch, head, query, key):
    return key <= query


def sliding(batch, head, query, key):
    return (key <= query) & (key > query - 512)


def chunked(batch, head, query, key):
    return (key <= query) & (key // 48 == query // 48)


@pytest.mark.parametrize(("function", "kind"), [
    (full, FULL), (sliding, MaskKind("sliding", 512)), (chunked, MaskKind("chunked", 48)),
])
def test_a_mask_is_known(function, kind):
    assert mask_kind(function, 4, 1050) == kind
    at = torch.arange(600)
    assert torch.equal(kind.sees(at, at), function(0, 0, at[:, None], at[None]))


@pytest.mark.parametrize(("function", "reason"), [
    (lambda batch, head, query, key: key <= query + 1, "not causal"),
    (lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0), "gaps"),
    (lambda batch, head, query, key: (key <= query) & ((key > 3) | (head == 0) | (query == key)), "between heads"),
    (lambda batch, head, query, key: (key <= query) & (key >= query // 2), "neither"),
    (lambda batch, head, query, key: key < query, "not its own|not causal"),
])
def test_another_mask_is_refused(function, reason):
    with pytest.raises(Refused, match=reason):
        mask_kind(function, 4, 1050)


def test_a_window_beyond_the_farthest_position_is_none():
    assert mask_kind(sliding, 4, 400) == FULL
