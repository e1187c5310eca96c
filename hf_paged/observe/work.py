"""Estimate of a step's computation and memory traffic, from its plan and the sizes of the model.

Counted are the products of the layers and of the head, and attention over all tokens before each; norms, RoPE,
activations, sampling and sliding windows are ignored. Bytes are a minimum without sharing: every weight once a step (of
experts the part that this many tokens may choose), the keys and values of each row's tokens, and the new ones; rows
with a common prefix may read less (`EngineStats.kv_bytes_saved`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import nn

from hf_paged.models import KVSpec
from hf_paged.scheduler import StepPlan


class Work(NamedTuple):
    """Work of one device: floating-point operations, bytes read and bytes written."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class ModelSizes(NamedTuple):
    """Sizes from which a step's work follows; for a sharded model, of this rank's part.

    Attributes:
        weights: Parameters of the layers that every token is multiplied with.
        expert_weights: Parameters of all experts; a token uses `expert_share` of them.
        head_weights: Parameters of the head.
        weight_itemsize: Bytes of a parameter.
        pair_flops: Operations of one token's attention to one token, over all layers.
        token_bytes: Bytes of the keys and values of one token, over all layers.
    """

    weights: int
    expert_weights: int
    expert_share: float
    head_weights: int
    weight_itemsize: int
    pair_flops: int
    token_bytes: int

    def of(self, plan: StepPlan) -> Work:
        start, num_new = plan.start.astype(np.float64), plan.num_new_tokens
        tokens, rows = float(num_new.sum()), len(start)
        if plan.num_decode_rows == rows:  # one token per row
            read_tokens = pairs = float(start.sum()) + rows
            sampled = rows
        else:
            pairs = float(start @ num_new + (num_new * (num_new + 1.0)).sum() / 2)
            read_tokens, sampled = float(start.sum()) + tokens, int(plan.samples.sum())
        products = (self.weights + self.expert_weights * self.expert_share) * tokens + self.head_weights * sampled
        touched = self.weights + self.expert_weights * min(1.0, self.expert_share * tokens) + self.head_weights
        return Work(2.0 * products + self.pair_flops * pairs,
                    touched * self.weight_itemsize + self.token_bytes * read_tokens, self.token_bytes * tokens)


def sizes_of(model: Any, spec: KVSpec, num_ranks: int) -> ModelSizes:
    """Return the sizes of a causal LM in its current state; `spec` is of its cache on this rank."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(module.weight) for module in (head, embedding) if module is not None}
    weights = expert_weights = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in apart or parameter.dim() < 2 or isinstance(module, nn.Embedding):
                continue
            if parameter.dim() == 3:  # experts: [experts, out, in] or transposed
                expert_weights += parameter.numel()
            elif name.endswith("weight") or name.startswith("lora_"):
                weights += parameter.numel()
    experts = next((n for key in ("num_experts", "num_local_experts") if (n := getattr(config, key, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    query_heads = getattr(config, "num_attention_heads", 0) // num_ranks
    return ModelSizes(
        weights, expert_weights, chosen / experts, 0 if head is None else head.weight.numel(),
        spec.cache_dtype.itemsize, 4 * spec.num_layers * query_heads * spec.head_dim, spec.block_bytes(1),
    )
