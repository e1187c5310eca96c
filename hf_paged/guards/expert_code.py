# mypy: disallow-untyped-defs=False
"""Code of routers and gates of experts as transformers writes it, in whose place hf_paged's kernels compute.

The functions of `ROUTERS` and `GATES` are never called: a class's function is known if it compiles to the same code as
one of them, whatever the class's name and the version of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def softmax(self, hidden_states):  # Qwen2-MoE, Qwen3-MoE, Qwen3-Next, OLMoE
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    if self.norm_topk_prob:
        router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_top_value = router_top_value.to(router_logits.dtype)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def normed_softmax(self, hidden_states):  # Qwen3.5-MoE, Qwen3-VL-MoE
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_top_value = router_top_value.to(router_logits.dtype)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def float32_softmax(self, hidden_states):  # Mixtral, MiniMax
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def topk_softmax(self, hidden_states):  # gpt-oss
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
    router_scores = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)
    return router_logits, router_scores, router_indices


def float32_topk_softmax(self, hidden_states):  # Granite-MoE
    router_logits = F.linear(hidden_states, self.weight).float()
    top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)
    top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)
    return router_logits, top_k_weights, top_k_index


def sigmoid(self, hidden_states, e_score_correction_bias):  # MiniMax-M2
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.to(self.weight.dtype), self.weight)
    routing_weights = nn.functional.sigmoid(router_logits.float())
    scores_for_choice = routing_weights + e_score_correction_bias
    _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
    top_k_weights = routing_weights.gather(1, top_k_index)
    top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)
    router_scores = top_k_weights
    return router_logits, router_scores, top_k_index


def sigmoid_in_groups(self, hidden_states):  # DeepSeek-V3, GLM-4-MoE and their like
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
    scores = router_logits.sigmoid()
    scores_for_choice = scores + self.e_score_correction_bias
    group_scores = (
        scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)
        .topk(2, dim=-1)[0]
        .sum(dim=-1)
    )
    group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)
    group_mask.scatter_(1, group_idx, 1)
    score_mask = (
        group_mask.unsqueeze(-1)
        .expand(-1, self.num_group, self.num_experts // self.num_group)
        .reshape(-1, self.num_experts)
    )
    scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
    topk_weights = scores.gather(1, topk_indices)
    if self.norm_topk_prob:
        denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
        topk_weights /= denominator
    topk_weights = topk_weights * self.routed_scaling_factor
    return router_logits, topk_weights, topk_indices


def clamped(self, gate_up):  # gpt-oss
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output


ROUTERS = (softmax, normed_softmax, float32_softmax, topk_softmax, float32_topk_softmax, sigmoid, sigmoid_in_groups)
GATES = (clamped,)


def known_code(function: Any, known: Iterable[Any]) -> str | None:
    """Return the name of the function in `known` that has the code of `function`, or None."""
    code = _code(function)
    return next((one.__name__ for one in known if code is not None and _code(one) == code), None)


def ignores_logits(block: type[nn.Module]) -> bool:
    """Return whether a block's forward takes the first result of its router, the logits, as `_`."""
    code = getattr(block.forward, "__code__", None)
    return code is not None and "_" in code.co_varnames


def _code(function: Any) -> tuple | None:
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_code, code.co_names, repr(code.co_consts), code.co_argcount)
