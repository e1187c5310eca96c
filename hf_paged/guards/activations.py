"""Classes of activation modules: elementwise ones, and SiLU."""

from __future__ import annotations

from torch import nn
from transformers.activations import ACT2FN

SILU = (nn.SiLU, type(ACT2FN["silu"]))
ELEMENTWISE = (*SILU, *(type(ACT2FN[name]) for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")))
