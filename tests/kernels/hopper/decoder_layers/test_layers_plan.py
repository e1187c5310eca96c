"""One launch for all layers refuses what it would compute wrongly; no GPU runs it here."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hf_paged.kernels.hopper.decoder_layers.plan import LayersPlan, LayerTensors, check_layers
from hf_paged.kernels.hopper.decoder_layers.shape import FAR_BITS, LayerFields


def layers(count=2, hidden=1024, inner=1024, heads=8, kv_heads=4, head_dim=128, block_size=16, dtype=torch.bfloat16,
           shift=0):
    """`shift`: elements by which the last layer's cache lies beside where it should."""
    slots = 2 * block_size * kv_heads * head_dim

    def weight(*shape):
        return torch.empty(shape, dtype=dtype)

    width, sizes = heads * head_dim, [(heads + 2 * kv_heads) * head_dim * hidden, hidden * heads * head_dim,
                                      2 * inner * hidden, hidden * inner]
    memory = torch.empty(count * sum(sizes), dtype=dtype)
    pool = torch.empty(2 * count * slots + shift, dtype=dtype)
    made, begin = [], 0
    for i in range(count):
        found = []
        for size, columns in zip(sizes, (hidden, width, hidden, inner), strict=True):
            found.append(memory[begin : begin + size].view(-1, columns))
            begin += size
        for j in (2 * i, 2 * i + 1):
            at = j * slots + (shift if i == count - 1 else 0)
            found.append(pool[at : at + slots].view(2, block_size, kv_heads, head_dim))
        made.append(LayerTensors(*found, weight(hidden), weight(hidden), weight(head_dim), weight(head_dim)))
    return made


def test_layers_that_it_takes():
    check_layers(layers())
    check_layers(layers(inner=1536, heads=16, block_size=64))


def test_the_table_and_the_descriptors_say_where_everything_lies():
    """Kinds lie in memory of their own; their widths differ."""
    made = layers(3, hidden=1024, inner=1536, heads=16)
    kinds = [torch.empty(3, *made[0][i].shape, dtype=torch.bfloat16) for i in (0, 3, 1, 2)]
    qkv, down, o, gate_up = kinds
    made = [LayerTensors(*weights, *layer[4:]) for *weights, layer in zip(qkv, o, gate_up, down, made, strict=True)]
    plan = LayersPlan(made, made[0].input_norm, 1e-6, 1.0, 2)
    assert [box.strides for box in plan.weights] == [[2**36, 64, width, 1] for width in (1024, 2048, 1024, 1536)]
    assert plan.cache.strides == [2**36, 4 * 128, 128, 1] and FAR_BITS == 37, "of two bytes each"
    for layer, row in zip((*made, made[-1]), plan.table.tolist(), strict=True):
        fields = LayerFields(*row)
        for box, tensor, line in zip(plan.weights, layer[:4], fields[:4], strict=True):
            assert box.base.data_ptr() + 128 * line == tensor.data_ptr()
        for tensor, slot in zip(layer[4:6], fields[4:6], strict=True):
            assert plan.cache.base.data_ptr() + 2 * 4 * 128 * slot == tensor.data_ptr()
        addresses = [layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm, layer.keys, layer.values]
        assert list(fields[6:]) == [tensor.data_ptr() for tensor in addresses]


@pytest.mark.parametrize(("changed", "said"), [
    ({"count": 1}, "layers: 1"), ({"hidden": 512}, "hidden=512"), ({"inner": 512}, "inner=512"),
    ({"inner": 1152}, "inner=1152"), ({"head_dim": 64}, "head_dim=64"), ({"kv_heads": 2}, "kv_heads=2"),
    ({"heads": 12}, "heads=12"), ({"heads": 32}, "heads=32"), ({"block_size": 8}, "block_size=8"),
    ({"block_size": 24}, "block_size=24"), ({"dtype": torch.float16}, "bfloat16"),
    ({"shift": 8}, "caches: expected all at multiples of 1024 bytes"),
])
def test_layers_that_it_refuses(changed, said):
    with pytest.raises(ValueError, match=said):
        check_layers(layers(**changed))


@pytest.mark.parametrize(("rows", "sizes"), [
    (3, {}), (16, {}), (8, {"heads": 32, "kv_heads": 32}),  # more parts of rows than programs
    (8, {"inner": 6144}),  # no room for six chunks beside eight rows
])
def test_numbers_of_rows_that_it_refuses(rows, sizes):
    made = layers(**sizes)
    with pytest.raises(ValueError, match=f"rows={rows}"):
        LayersPlan(made, made[0].input_norm, 1e-6, 1.0, rows)
