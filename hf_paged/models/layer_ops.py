"""Operations of a decoder layer besides attention: hf_paged's kernels, or torch's own ops in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels.layer.add_rms_norm import add_rms_norm_reference, add_rms_norm_unchecked
from hf_paged.kernels.layer.linear import linear_parts_unchecked, linear_silu_mul_unchecked, linear_unchecked
from hf_paged.kernels.layer.qk_norm_rope_store import (
    qk_norm_rope_store_reference,
    qk_norm_rope_store_unchecked,
    step_tables,
)
from hf_paged.kernels.layer.silu_mul import silu_mul_reference, silu_mul_unchecked
from hf_paged.kernels.layer.store_kv import store_kv_unchecked
from hf_paged.kernels.layer.sum_splits_add_rms_norm import join_add_rms_norm_reference, join_add_rms_norm_unchecked


class LayerOps(NamedTuple):
    """Functions, one for each operation; arguments and results as in `hf_paged.kernels`, unchecked.

    Tensors are checked before: weights in `FusedExecutor.prepare`, results of called modules in `apply_module`.
    """

    linear: Callable[..., torch.Tensor]
    linear_parts: Callable[..., torch.Tensor]
    sum_splits_add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    linear_silu_mul: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step_tables: Callable[..., tuple]
    qk_norm_rope_store: Callable[..., torch.Tensor]


def _linear_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul_reference(F.linear(x, weight))


def _linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `linear_parts`; for a layer with a bias the whole product."""
    return linear_parts_unchecked(x, weight) if bias is None else linear_unchecked(x, weight, bias)


def _as_they_are(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tables


FUSED = LayerOps(linear_unchecked, _linear_parts, join_add_rms_norm_unchecked, linear_silu_mul_unchecked,
                 silu_mul_unchecked, add_rms_norm_unchecked, step_tables, qk_norm_rope_store_unchecked)
# A kernel writes the cache in any case: torch's ops would wait for the device to learn which tokens to write.
PLAIN = LayerOps(F.linear, F.linear, join_add_rms_norm_reference, _linear_silu_mul, silu_mul_reference,
                 add_rms_norm_reference, _as_they_are, partial(qk_norm_rope_store_reference, store=store_kv_unchecked))
