"""States of layers in tests of their kernels."""

from __future__ import annotations

import torch

from hf_paged.kernels.recurrent._convolution import LayerStates


def copied(states: LayerStates) -> LayerStates:
    return LayerStates(*(state.clone() for state in states))


def close(actual, expected, dtype):
    bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
