"""Operations of a decoder layer besides attention: hf_paged's kernels, torch's own ops in their place, or a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_paged.kernels.layer.add_rms_norm import add_rms_norm, add_rms_norm_reference
from hf_paged.kernels.layer.linear import linear, linear_parts, linear_silu_mul
from hf_paged.kernels.layer.linear_4bit import linear_4bit, linear_4bit_parts, linear_4bit_silu_mul
from hf_paged.kernels.layer.qk_norm_rope_store import (
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
    step_tables,
)
from hf_paged.kernels.layer.silu_mul import silu_mul, silu_mul_reference
from hf_paged.kernels.layer.store_kv import store_kv
from hf_paged.models.tuners import AdapterRows, apply_layer
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelHead


class LayerOps(NamedTuple):
    """Functions, one for each operation; arguments and results as in `hf_paged.kernels`.

    Tensors are checked before: weights in `FusedExecutor.prepare`, results of called modules in `apply_module`.
    """

    linear: Callable[..., torch.Tensor]
    linear_parts: Callable[..., torch.Tensor]
    linear_silu_mul: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step_tables: Callable[..., tuple]
    qk_norm_rope_store: Callable[..., torch.Tensor]


def _linear_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul_reference(F.linear(x, weight))


def _linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `linear_parts`; for a layer with a bias the whole product."""
    return linear_parts(x, weight) if bias is None else linear(x, weight, bias)


def _as_they_are(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tables


FUSED = LayerOps(linear, _linear_parts, linear_silu_mul, silu_mul, add_rms_norm, step_tables, qk_norm_rope_store)
PACKED = FUSED._replace(linear=linear_4bit, linear_parts=linear_4bit_parts, linear_silu_mul=linear_4bit_silu_mul)
# A kernel writes the cache in any case: torch's ops would wait for the device to learn which tokens to write.
PLAIN = LayerOps(F.linear, F.linear, _linear_silu_mul, silu_mul_reference, add_rms_norm_reference,
                 _as_they_are, partial(qk_norm_rope_store_reference, store=store_kv))


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly `torch.nn.Linear` or a rank's rows of one, with a float weight, without hooks.

    Eligibility checks whether these classes are patched.
    """
    return type(module) in (nn.Linear, ColumnParallelLinear) and is_untouched(module)


def is_untouched(module: nn.Module) -> bool:
    """Return whether a layer has a plain float weight, and neither hooks nor another forward than its class's."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return type(weight) is nn.Parameter and weight.is_floating_point() and "forward" not in vars(module)


def apply_linear(module: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                 rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [T, k] -> [T, n] by `linear`; a layer that is not plain (LoRA, quantized) is called as it stands."""
    if is_plain_linear(module):
        assert isinstance(module, nn.Linear)
        return linear(hidden, module.weight, module.bias)
    if type(module) is RowParallelLinear and module.group.is_parallel and is_untouched(module):
        return module.finish(linear(hidden, module.weight, None))
    return apply_module(module, hidden, rows)


def apply_module(module: nn.Module, hidden: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [T, k] -> [T, n] by a module as it stands; ValueError if kernels cannot read its result."""
    result = apply_layer(module, hidden, rows)
    same = result.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type)
    if not same or result.dim() != 2 or result.stride(1) != 1:
        found = f"{result.dtype} {list(result.shape)} with strides {list(result.stride())}"
        raise ValueError(f"{type(module).__name__} returned {found}: expected {hidden.dtype} [T, n], rows contiguous")
    return result


def row_product(module: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                rows: AdapterRows | None = None) -> tuple[torch.Tensor, ParallelGroup]:
    """Return `apply_linear`, and the ranks whose products still have to be summed; `SINGLE` if there are none."""
    if type(module) is RowParallelLinear and module.bias is None and is_untouched(module):
        return linear(hidden, module.weight, None), module.group
    return apply_linear(module, hidden, linear, rows), SINGLE


def apply_head(head: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
               rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [R, k] -> [R, this rank's own columns]; all columns of a head that is not sharded."""
    if type(head) is VocabParallelHead:
        return linear(hidden, head.weight, head.bias)
    return apply_linear(head, hidden, linear, rows)
