"""What the tests of ops with transformers' rounding share."""

import pytest
import torch

EPS = 1e-6
HALVES = [torch.float16, torch.bfloat16]


def runs(reference, kernel, dispatch):
    """(function, device, dtype) to test an op with: the interpreter truncates to bfloat16, so it gets none."""
    return [
        *(pytest.param(reference, "cpu", dtype) for dtype in (torch.float32, *HALVES)),
        *(pytest.param(dispatch, "cpu", dtype) for dtype in (torch.float32, *HALVES)),
        *(pytest.param(kernel, "cpu", d, marks=pytest.mark.interpreted) for d in (torch.float32, torch.float16)),
        *(pytest.param(dispatch, "cuda", d, marks=pytest.mark.gpu) for d in (torch.float32, *HALVES)),
    ]


def lower_runs(reference, kernel, dispatch):
    """(function, device, lower dtype) for an op whose tensors are of two dtypes."""
    return [case for case in runs(reference, kernel, dispatch) if case.values[2] is not torch.float32]


def assert_equal(actual, expected):
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
