"""Whole tensors out of the ranks' parts, uneven ones too, in collectives of a bounded size."""

from __future__ import annotations

import pytest
from ranks import run_ranks

LARGER = {3 * 3 * 3 * 4, 3 * 6 * 3 * 2, 3 * 3 * 4 * 4, 3 * 3 * 2 * 8}  # bytes of single tensors with their padding


@pytest.mark.slow
@pytest.mark.parametrize(("size", "bucket_bytes"), [pytest.param(2, 1 << 20, marks=pytest.mark.slow), (3, 64)])
def test_wholes_are_the_parts_side_by_side(size: int, bucket_bytes: int) -> None:
    """Cast as `to` does, again into the same memory after the parts changed."""
    for found in run_ranks("gather_checks:gather_all", size, bucket_bytes):
        sent = found.pop("sent")
        assert found == {"first": True, "again": True, "in_place": True}
        if bucket_bytes == 1 << 20:  # as many as there are runs of one dtype, but for what every rank has
            assert len(sent) == 4
        else:  # two to a collective at most, and one where that is larger than a bucket
            assert len(sent) == 5 and all(size <= bucket_bytes or size in LARGER for size in sent)
