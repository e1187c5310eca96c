"""Decode rows whose block tables begin with the same physical blocks, so that attention reads those once for all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PrefixGroups(NamedTuple):
    """Groups of a step's decode rows: a forest, since a group's members may share more in groups of their own.

    Group g is of the rows ``members[first[g] : first[g] + count[g]]``, which all read positions ``begin[g]`` to
    ``end[g] - 1`` from the same blocks. A group stands behind the one that it lies in and begins where that one ends;
    an outermost group begins at 0. So what a row shares is in pieces without a gap, in the order of the groups, and
    ends before its newest token. All arrays are int32.
    """

    members: np.ndarray  # [M] row numbers of the step, each once; members of a group follow each other
    first: np.ndarray  # [G] index in `members`
    count: np.ndarray  # type: ignore[assignment]  # [G] at least 2
    begin: np.ndarray  # [G] position, a multiple of the block size
    end: np.ndarray  # [G] position, a multiple of the block size, above `begin`
