"""packed_convolution: the reference is stock's function row by row, and the kernel the reference."""

from __future__ import annotations

import pytest
import torch
from packed_cases import COUNTS, packed, same
from recurrent_models import with_idiom
from state_cases import close

from hf_paged.kernels.recurrent.packed_convolution import (
    PackedRows,
    packed_convolution,
    packed_convolution_reference,
    packed_convolution_triton,
)

SIZES = [{}, {"heads": 3, "group": 1, "key_dim": 32, "value_dim": 16, "taps": 2}, {"group": 3, "value_dim": 16}]


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_the_reference(sizes, dtype, has_bias, tokens):
    case = packed(dtype, **sizes)
    bias = torch.linspace(-1, 1, len(case.weight)).to(dtype) if has_bias else None
    expected, found = case.conv.clone(), case.conv.clone()
    known = packed_convolution_reference(case.parts, case.weight, bias, expected, case.rows)
    made = packed_convolution_triton(case.parts, case.weight, bias, found, case.rows, tokens=tokens)
    close(made, known, dtype)
    assert same(found, expected) and same(found[case.others], case.conv[case.others])
    assert not found[case.begun].isnan().any()


@with_idiom
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_stocks_function(dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    case = packed(dtype)
    conv, mixed = case.conv.clone(), torch.cat([part.flatten(1) for part in case.parts], 1)
    made = packed_convolution(case.parts, case.weight, None, conv, case.rows)
    starts, lengths, slots = (tensor.tolist() for tensor in case.rows)
    for first, count, length, slot in zip(starts, COUNTS, lengths, slots, strict=False):
        inputs = mixed[None, first : first + count].mT
        if length > count:
            inputs = torch.cat([case.conv[slot][None], inputs], 2)
        if count:
            expected = causal_conv1d_fn(inputs, case.weight[:, 0], None, activation="silu")[0, :, -count:].T
            torch.testing.assert_close(made[first : first + count], expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(conv[slot], torch.nn.functional.pad(inputs, (4, 0))[0, :, -4:])


def test_without_tokens():
    case = packed(torch.float32, counts=(0, 0), earlier=(1, 0))
    assert packed_convolution(case.parts, case.weight, None, case.conv, case.rows).shape == (0, 192)
    none = PackedRows(case.rows.starts[:1], case.rows.lengths[:0], case.rows.slots[:0])
    assert packed_convolution(case.parts, case.weight, None, case.conv, none).shape == (0, 192)
