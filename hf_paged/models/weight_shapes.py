"""Check that a model's weights have the shapes in which fused layers read them: made once, not in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_paged.kernels._checks import Expected, check_tensors
from hf_paged.models.base import KVSpec
from hf_paged.models.plain_linear import is_plain_linear
from hf_paged.parallel.layers import RowParallelLinear, VocabParallelHead

KEYS_VALUES = ("k_proj", "v_proj")


def check_weights(model: Any, layers: list[Any], spec: KVSpec, num_heads: int, dtype: torch.dtype | None) -> None:
    """Raise ValueError for the first norm or plain linear layer of another shape or dtype than expected.

    `num_heads`: this rank's query heads. `dtype`: dtype of all weights; None: any. Results of modules that are called
    as they stand are checked where they are called.
    """
    hidden, head = model.config.hidden_size, model.lm_head
    check_tensors(_vector("norm", model.model.norm, hidden, dtype))
    if is_plain_linear(head) or type(head) is VocabParallelHead:
        check_tensors(Expected("lm_head.weight", head.weight, (None, hidden), dtype, strided=True))
    for i, layer in enumerate(layers):
        check_tensors(*_of_layer(f"layers.{i}.", layer, spec, num_heads, hidden, dtype))


def _of_layer(prefix: str, layer: Any, spec: KVSpec, num_heads: int, hidden: int,
              dtype: torch.dtype | None) -> Iterator[Expected]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _vector(prefix + name, getattr(layer, name), hidden, dtype)
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(attention, name, None)) is not None:
            yield _vector(prefix + name, norm, spec.head_dim, dtype)
    queries, keys = num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"q_proj": (queries, hidden), "o_proj": (hidden, queries)} | dict.fromkeys(KEYS_VALUES, (keys, hidden))
    yield from _linears(prefix, attention, shapes, dtype)
    if "experts" not in mlp._modules and is_plain_linear(_inside(mlp.gate_proj)):
        inner = len(_inside(mlp.gate_proj).weight)
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        yield from _linears(prefix, mlp, shapes, dtype)


def _linears(prefix: str, owner: Any, shapes: dict[str, tuple[int, int]],
             dtype: torch.dtype | None) -> Iterator[Expected]:
    for name, shape in shapes.items():
        linear: Any = _inside(getattr(owner, name))
        if not is_plain_linear(linear) and type(linear) is not RowParallelLinear:
            continue
        yield Expected(f"{prefix}{name}.weight", linear.weight, shape, dtype, strided=True)
        if linear.bias is not None:
            yield Expected(f"{prefix}{name}.bias", linear.bias, shape[:1], dtype, strided=True)


def _inside(linear: Any) -> Any:
    """Return the base layer of a tuner's layer (LoRA), or the layer itself."""
    return linear._modules.get("base_layer", linear)


def _vector(name: str, norm: nn.Module, size: int, dtype: torch.dtype | None) -> Expected:
    return Expected(f"{name}.weight", norm.weight, (size,), dtype)  # type: ignore[arg-type]
