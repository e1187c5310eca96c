"""What `import hf_paged` gives, and what it does not import yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_paged


def test_every_public_name_is_there_and_has_one_home():
    listed = [name for names in hf_paged._MODULES.values() for name in names]
    assert sorted(listed) == sorted(hf_paged.__all__)
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name).__name__ == name
        assert name in dir(hf_paged)
    with pytest.raises(AttributeError, match="module 'hf_paged' has no attribute 'Enginee'"):
        _ = hf_paged.Enginee


@pytest.mark.parametrize("module", ["hf_paged", "hf_paged.integration.parallel.worker"])
def test_nothing_slow_is_imported_before_it_is_used(module):
    """A worker watches its parent from the start, and not after the seconds that torch takes."""
    code = f"import sys, {module}; print({{'torch', 'transformers', 'triton'}} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(filter(None, sys.path))})  # fmt: skip
    assert made.stdout == "set()\n"
