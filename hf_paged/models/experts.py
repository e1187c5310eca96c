"""Blocks of experts by hf_paged's kernels: what they read of a block, and why a block's own modules run instead.

The numbers are those of transformers' `batched_mm` and `grouped_mm`, with their roundings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe

from hf_paged.device.cuda import compute_capability
from hf_paged.guards.families import SILU
from hf_paged.kernels._triton import triton
from hf_paged.kernels.experts.down import down_unchecked
from hf_paged.kernels.experts.gate_up import gate_up_unchecked
from hf_paged.kernels.experts.join import ExpertOutputs, join_experts_unchecked
from hf_paged.kernels.experts.route import (
    MAX_EXPERTS,
    MAX_ROWS,
    SIGMOID,
    SOFTMAX,
    TOPK_SOFTMAX,
    RouterRule,
    RouterWeights,
    num_arrivals,
    route_unchecked,
)
from hf_paged.models.executor import ModelExecutor
from hf_paged.models.layer_ops import apply_module
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import ShardedExperts

logger = logging.getLogger(__name__)

_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
# Attributes of experts; transformers 5.17 has none of the kinds that later versions name by the last two.
_EXPECTED = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False,
             "has_post_expert_norm": False, "_is_expert_parallel": False}
_MULTIPLE = 16  # of the sizes: rows of weights begin at multiples of 16 bytes


def _softmax(router: Any) -> RouterRule:
    return RouterRule(SOFTMAX, router.top_k, norm=router.norm_topk_prob)


def _softmax_in_float32(router: Any) -> RouterRule:
    return RouterRule(SOFTMAX, router.top_k, norm=True, keeps_float32=True)


def _topk_softmax(router: Any) -> RouterRule:
    return RouterRule(TOPK_SOFTMAX, router.top_k)


def _sigmoid_in_groups(router: Any) -> RouterRule:
    return RouterRule(SIGMOID, router.top_k, norm=router.norm_topk_prob, scaling=router.routed_scaling_factor,
                      num_groups=router.num_group, topk_group=router.topk_group)


# By module and class of a router: how its forward chooses experts.
_ROUTERS: dict[tuple[str, str], Callable[[Any], RouterRule]] = {
    (f"transformers.models.{package}.modeling_{package}", name): read for package, name, read in (
        ("qwen3_moe", "Qwen3MoeTopKRouter", _softmax), ("qwen2_moe", "Qwen2MoeTopKRouter", _softmax),
        ("olmoe", "OlmoeTopKRouter", _softmax), ("mixtral", "MixtralTopKRouter", _softmax_in_float32),
        ("gpt_oss", "GptOssTopKRouter", _topk_softmax), ("glm4_moe", "Glm4MoeTopkRouter", _sigmoid_in_groups),
    )
}


class ExpertsParts(NamedTuple):
    """What steps read of a block of experts.

    Attributes:
        router, rule: weights of the router, and how it chooses.
        gate_up, down: weights of the experts [E, 2 * I, H] and [E, H, I], or this rank's slices of I.
        ranks: over which the block's output is summed; `SINGLE` if there are no others.
        arrivals: counters of the router's kernel, which no two launches at the same time share.
    """

    router: RouterWeights
    rule: RouterRule
    gate_up: torch.Tensor
    down: torch.Tensor
    ranks: ParallelGroup
    arrivals: torch.Tensor

    def is_same(self, other: Any) -> bool:
        """Return whether a step computes the same with both."""
        if not isinstance(other, ExpertsParts) or self.rule != other.rule:
            return False
        mine, others = ((*one.router, one.gate_up, one.down, one.ranks, one.arrivals) for one in (self, other))
        return all(a is b for a, b in zip(mine, others, strict=True))

    def outputs(self, hidden: torch.Tensor, lengths: torch.Tensor | None) -> ExpertOutputs | None:
        """Return the products of each row's experts; None for more rows than the kernels take.

        ``lengths`` [T] int32: 0 for padding rows, which choose no experts; None: there are none.
        """
        if len(hidden) > MAX_ROWS:
            return None
        routes = route_unchecked(hidden, self.router, self.rule, self.arrivals, lengths)
        inner = gate_up_unchecked(hidden, self.gate_up, routes)
        return ExpertOutputs(down_unchecked(inner, self.down, routes), routes)


def apply_experts(block: nn.Module, parts: ExpertsParts | None, hidden: torch.Tensor,
                  lengths: torch.Tensor | None) -> tuple[torch.Tensor | ExpertOutputs, ParallelGroup]:
    """Compute a block of experts on hidden [T, H]: [T, H], or products that are not added up yet.

    Returns the ranks over which the result still has to be summed as well.
    """
    outputs = None if parts is None else parts.outputs(hidden, lengths)
    if parts is None or outputs is None:
        return apply_module(block, hidden), SINGLE
    return (join_experts_unchecked(outputs), parts.ranks) if parts.ranks.is_parallel else (outputs, SINGLE)


def new_arrivals(device: torch.device) -> torch.Tensor:
    """Return counters for `ExpertsParts.arrivals`."""
    return torch.zeros(num_arrivals(), dtype=torch.int32, device=device)


def why_not_on(device: torch.device) -> str | None:
    """Return why a device does not run the kernels, or None."""
    is_known = triton is not None and (compute_capability(device) or (0, 0)) >= (8, 0)
    return None if is_known else "the kernels need Triton and an NVIDIA GPU of compute capability 8.0 or more"


class ExpertsReader:
    """Reads the blocks of experts of an executor's model, and logs why a block's own modules run."""

    def __init__(self, executor: ModelExecutor, *, is_wanted: bool) -> None:
        self._executor, self._is_wanted = executor, is_wanted
        self._arrivals: torch.Tensor | None = None  # of `ExpertsParts`
        self._why: str | None = None  # what the log says last

    def parts(self, block: nn.Module) -> ExpertsParts | None:
        """Return the parts of a block; None for one that is called as it stands."""
        found = self.read(block, self._executor.kv_spec().device)
        if not isinstance(found, str):
            return found
        if found != self._why:
            logger.info("hf_paged: experts run by transformers' modules: %s", found)
        self._why = found
        return None

    def read(self, block: nn.Module, device: torch.device) -> ExpertsParts | str:
        """Return the parts of a block for a device, or why its own modules would run there."""
        if not self._is_wanted:
            return "fused_experts=False"
        spec = self._executor.kv_spec()
        if self._arrivals is None or self._arrivals.device != spec.device:
            self._arrivals = new_arrivals(spec.device)
        return why_not_on(device) or read_experts(block, self._executor.config._experts_implementation,
                                                  spec.compute_dtype, self._arrivals)


def read_experts(block: nn.Module, implementation: str | None, dtype: torch.dtype,
                 arrivals: torch.Tensor) -> ExpertsParts | str:
    """Return the parts of a block of experts, or why its own modules have to run.

    Args:
        block: a decoder layer's `mlp` with `experts`, of a class of transformers, whose code eligibility has checked.
        implementation: implementation of experts in the config.
        dtype: dtype of hidden states.
        arrivals: see `new_arrivals`.
    """
    if implementation not in _IMPLEMENTATIONS:
        return f"the config names the implementation {implementation!r} of experts"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"hidden states are {dtype}, and the kernels take float16 and bfloat16"
    router, experts = block._modules.get("gate") or block._modules.get("router"), block._modules["experts"]
    read = _ROUTERS.get((type(router).__module__, type(router).__name__))
    if router is None or experts is None or read is None:
        return f"the router is a {type(router).__name__}"
    modules = (block, router, experts)
    if len(list(block.children())) > 2 or any(
            one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in modules):
        return "the block of experts has hooks, or other modules than a router and experts"
    rule = read(router)
    found = next(_unlike(router, experts, rule, dtype), None)
    return _parts(router, experts, rule, arrivals) if found is None else f"experts have {found}"


def _parts(router: Any, experts: Any, rule: RouterRule, arrivals: torch.Tensor) -> ExpertsParts:
    weights = RouterWeights(router.weight, getattr(router, "bias", None),
                            getattr(router, "e_score_correction_bias", None))
    ranks = experts.group if isinstance(experts, ShardedExperts) and experts.group.is_parallel else SINGLE
    return ExpertsParts(weights, rule, experts.gate_up_proj, experts.down_proj, ranks, arrivals)


def _unlike(router: Any, experts: Any, rule: RouterRule, dtype: torch.dtype) -> Iterator[str]:
    """Yield what the kernels do not take of a router and its experts."""
    for name, value in _EXPECTED.items():
        if getattr(experts, name, False) is not value:
            yield f"{name}={getattr(experts, name, False)!r}"
    if type(experts)._apply_gate is not moe._default_apply_gate or not isinstance(experts.act_fn, SILU):
        yield "another activation than silu(gate) * up"
    if set(experts._parameters) != {"gate_up_proj", "down_proj"}:
        yield "other parameters than gate_up_proj and down_proj"
        return
    for name, weight in (*router._parameters.items(), *experts._parameters.items()):
        if type(weight) is not nn.Parameter or weight.dtype != dtype or not weight.is_contiguous():
            yield f"in {name} no plain contiguous parameter of {dtype}"
    for name, buffer in router._buffers.items():
        if buffer is None or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            yield f"in {name} no buffer of float32"
    (num_experts, width), gate_up, down = router.weight.shape, experts.gate_up_proj.shape, experts.down_proj.shape
    inner = down[-1]
    if gate_up != (num_experts, 2 * inner, width) or down != (num_experts, width, inner):
        yield f"weights {list(gate_up)} and {list(down)}"
    if num_experts > MAX_EXPERTS or rule.top_k > num_experts or num_experts % rule.num_groups:
        yield f"a router that chooses {rule.top_k} of {num_experts}"
    if width % _MULTIPLE or inner % _MULTIPLE:
        yield f"sizes {width} and {inner}, of which one is no multiple of {_MULTIPLE}"
