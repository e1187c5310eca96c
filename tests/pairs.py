"""Fewer cases than a product of parameters has, in all tests or in those of the core tier."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*parameters: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, in which each value meets each value of every other parameter.

    A `pytest.param` stands for the arguments that it holds, with its marks.
    """
    return [_joined([values[i] for values, i in zip(parameters, row, strict=True)])
            for row in _rows([range(len(values)) for values in parameters])]


def _rows(ranges: list[range]) -> list[tuple[int, ...]]:
    """Greedy: the first row that has the most pairs of those that no row has yet."""
    missing = {pair for row in product(*ranges) for pair in _pairs(row)}
    rows = []
    while missing:
        rows.append(max(product(*ranges), key=lambda row: len(missing & _pairs(row))))
        missing -= _pairs(rows[-1])
    return rows


def _pairs(row: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(row), 2))


def _joined(values: list[Any]) -> Any:
    params = [value if isinstance(value, type(pytest.param())) else pytest.param(value) for value in values]
    marks = [mark for param in params for mark in param.marks]
    return pytest.param(*(value for param in params for value in param.values), marks=marks)


def slow_but(values: Iterable[Any], *core: Any) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which only `core` belong to the core tier of the tests."""
    values = list(values)
    if missing := [value for value in core if value not in values]:
        raise ValueError(f"core={missing}: expected some of {values}")
    return [value if value in core else pytest.param(value, marks=pytest.mark.slow) for value in values]
