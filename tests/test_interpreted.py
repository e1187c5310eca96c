"""The marker `interpreted`: such tests need kernels that are interpreted, and say so where they are not."""

from types import SimpleNamespace

import interpreted as plugin
import pytest


@pytest.mark.parametrize(("name", "outcome"), [
    ("COMPILED", pytest.skip.Exception), ("TOO_LATE", pytest.fail.Exception),
])
def test_compiled_kernels_are_not_given_cpu_tensors(name, outcome, monkeypatch):
    for other in ("COMPILED", "TOO_LATE"):
        monkeypatch.setattr(plugin, other, other == name)
    plugin.pytest_runtest_setup(SimpleNamespace(get_closest_marker=lambda marker: None))
    with pytest.raises(outcome):
        plugin.pytest_runtest_setup(SimpleNamespace(get_closest_marker=lambda marker: marker))
