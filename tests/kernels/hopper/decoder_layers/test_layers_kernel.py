"""The kernel for all layers, as far as it can be looked at without a GPU."""

from pathlib import Path

import pytest
from compiled_code import lines_of

pytest.importorskip("triton.experimental.gluon")

# hidden, inner, heads, KV heads, layers, block size, has head norms, rows
SHAPES = [
    (1024, 3072, 16, 8, 28, 16, True, 1), (1024, 3072, 16, 8, 28, 64, True, 8), (2048, 6144, 16, 8, 28, 16, True, 4),
    (2560, 9728, 32, 8, 36, 16, True, 4), (4096, 14336, 32, 8, 32, 16, False, 2),
]


@pytest.mark.slow
def test_it_fits_a_multiprocessor_and_keeps_all_in_registers():
    script = Path(__file__).with_name("compile_layers.py")
    for shape, counts in zip(SHAPES, lines_of(script, SHAPES, timeout=300), strict=True):
        assert counts["shared"] <= 227 << 10, shape
        written_to_memory = counts["STL"]
        assert written_to_memory <= 4 < min(counts["HMMA"], counts["UTMALDG"]), shape
