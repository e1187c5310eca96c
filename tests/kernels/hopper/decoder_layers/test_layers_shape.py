"""Whatever the model, a product's chunks fit shared memory: it waits for all of them before it gives one back."""

from hypothesis import given
from hypothesis import strategies as st

from hf_paged.kernels.hopper.decoder_layers.shape import PROGRAMS, LayersShape, chunks_together

WIDTHS = st.integers(2, 40).map(lambda n: 512 * n)
POWERS = st.integers(2, 7).map(lambda n: 1 << n)


@given(st.integers(1, 400), st.booleans())
def test_chunks_beside_each_other_share_a_product_out(rows, paired):
    together, chunks = chunks_together(rows, paired), -(-rows // 8)
    assert chunks % together == 0
    assert together <= (3 if paired else 4)


@given(WIDTHS, WIDTHS, POWERS, POWERS, st.sampled_from([1, 2, 4, 8]))
def test_what_has_room_fits_programs_and_shared_memory(hidden, inner, heads, kv_heads, rows):
    shape = LayersShape(hidden, inner, max(heads, kv_heads), kv_heads, 2, 16, True, rows)
    if not shape.has_room:
        return
    assert shape.splits * kv_heads * rows == PROGRAMS
    assert all(width % shape.columns == 0 for width in (hidden, inner, shape.mixed))
    assert 0 < shape.depth <= shape.stages
    assert 0 < shape.kv_depth <= shape.stages
    assert shape.positions % 16 == 0
    for width, paired in ((shape.qkv, False), (hidden, False), (inner, True)):
        together = chunks_together(width // PROGRAMS, paired)
        assert together * (2 if paired else 1) <= shape.stages


def test_rows_of_the_models_that_were_timed():
    """hidden, inner, heads, KV heads: Qwen3 0.6B, 1.7B, 4B and 8B, Llama 8B."""
    found = {
        sizes: [rows for rows in (1, 2, 4, 8, 16) if LayersShape(*sizes, 28, 16, True, rows).has_room]
        for sizes in ((1024, 3072, 16, 8), (2048, 6144, 16, 8), (2560, 9728, 32, 8), (4096, 12288, 32, 8),
                      (4096, 14336, 32, 8))
    }
    assert list(found.values()) == [[1, 2, 4, 8], [1, 2, 4], [1, 2, 4], [1, 2], [1, 2]]
