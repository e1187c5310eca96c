"""What the tests of ops with transformers' rounding share."""

import pytest
import torch

EPS = 1e-6
HALVES = [torch.float16, torch.bfloat16]


def runs(reference, kernel, dispatch, *for_many):
    """(function, device, dtype) to test an op with: the interpreter truncates to bfloat16, so it gets none.

    `for_many`: kernels that `dispatch` takes for more rows than the tests have.
    """
    return [
        *(pytest.param(reference, "cpu", dtype) for dtype in (torch.float32, *HALVES)),
        *(pytest.param(dispatch, "cpu", dtype) for dtype in (torch.float32, *HALVES)),
        *(pytest.param(function, "cpu", d, marks=pytest.mark.interpreted)
          for function in (kernel, *for_many) for d in (torch.float32, torch.float16)),
        *(pytest.param(function, "cuda", d, marks=pytest.mark.gpu)
          for function in (dispatch, *for_many) for d in (torch.float32, *HALVES)),
    ]


def lower_runs(*functions):
    """(function, device, lower dtype) for an op whose tensors are of two dtypes; `functions` as in `runs`."""
    return [case for case in runs(*functions) if case.values[2] is not torch.float32]


def assert_equal(actual, expected):
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
