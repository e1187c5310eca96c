"""Which cases of a test with the mark `each_value` belong to the core tier of the tests; the others become slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)  # before tests are shuffled, and those of the other tier left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if hasattr(item, "callspec") and "each_value" in marks and not marks & {"slow", "gpu"}:
            cases[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    for some in cases.values():
        some.sort(key=lambda item: [*item.callspec.indices.values()])  # type: ignore[attr-defined]  # however shuffled
        values = {item: {(name, repr(value)) for name, value in item.callspec.params.items()} for item in some}
        for item in set(some) - set(covering(values)):
            item.add_marker(pytest.mark.slow)


def covering(values: dict[Any, set[Any]]) -> Iterable[Any]:
    """Few of the keys, whose values are all values: the one that has most of what is missing, one after the other."""
    missing = set().union(*values.values())
    while missing:
        best = max(values, key=lambda key: len(missing & values[key]))
        yield best
        missing -= values[best]
