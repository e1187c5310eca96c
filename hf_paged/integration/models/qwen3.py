"""Dense Qwen3: the decoder's layers on packed tokens, with merged projections, fused ops and paged attention.

Follows `Qwen3Model.forward`, `Qwen3DecoderLayer.forward` and `Qwen3Attention.forward` of transformers 5.17 to 5.23,
rounding included. A projection that is not a plain layer (LoRA, quantized) is called as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3 as stock

from hf_paged.integration.models.activations import ELEMENTWISE, SILU
from hf_paged.integration.models.adapter import KVSpec, ModelAdapter, StepContext
from hf_paged.integration.models.layer_ops import LayerOps
from hf_paged.integration.models.merged import MergedWeight
from hf_paged.integration.models.own_code import is_own_code
from hf_paged.integration.models.plain_linear import apply_linear
from hf_paged.integration.models.rope import RopeTable, longest_unchanged

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# As they were when hf_paged was imported.
REPLACED_FUNCTIONS = {
    name: getattr(stock, name)
    for name in ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward", "repeat_kv", "create_causal_mask",
                 "create_sliding_window_causal_mask")
}  # fmt: skip


class Projections(NamedTuple):
    """Linear layers over the same input, and their merged weight where there is one."""

    linears: tuple[nn.Module, ...]
    weight: torch.Tensor | None
    ops: LayerOps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, k] -> [T, sum of outputs]."""
        if self.weight is not None:
            return self.ops.linear(hidden, self.weight)
        return torch.cat([apply_linear(layer, hidden, self.ops.linear) for layer in self.linears], dim=-1)

    def silu_mul(self, hidden: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of a gate and an up projection: [T, k] -> [T, inner]."""
        if self.weight is None:
            return self.ops.silu_mul(self(hidden))
        return self.ops.linear_silu_mul(hidden, self.weight)


class Qwen3Adapter(ModelAdapter):
    def __init__(self, model: stock.Qwen3ForCausalLM, **techniques: bool) -> None:
        super().__init__(model, stock.Qwen3ForCausalLM, **techniques)
        self._rope = RopeTable()
        self._merged: dict[str, MergedWeight] = {}
        self._qkv: list[Projections] = []
        self._gate_up: list[Projections] = []

    def kv_spec(self) -> KVSpec:
        config, weight = self.model.config, self.model.model.embed_tokens.weight
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVSpec(len(self._layers()), config.num_key_value_heads, head_dim, weight.dtype, weight.device)

    def max_length(self) -> int:
        return longest_unchanged(self.model.config)

    def prepare(self, max_model_len: int) -> None:
        spec = self.kv_spec()
        self._rope.update(self.model.model.rotary_emb, max_model_len, spec.dtype, spec.device)
        self._qkv, self._gate_up = self._collect(merge=self._merge_weights)

    def is_current(self) -> bool:
        held = [*self._qkv, *self._gate_up]
        found = [projections for group in self._collect(merge=False) for projections in group]
        same = all(a.linears == b.linears and a.weight is b.weight for a, b in zip(held, found, strict=False))
        return same and len(held) == len(found) and self._rope.is_made_from(self.model.model.rotary_emb)

    def release(self) -> None:
        for merged in self._merged.values():
            merged.release()
        self._merged.clear()
        self._qkv, self._gate_up, self._rope = [], [], RopeTable()

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        decoder, ops, cos, sin = self.model.model, self._ops, self._rope.cos, self._rope.sin
        assert cos is not None and sin is not None, "prepare() comes first"
        delta: torch.Tensor = decoder.embed_tokens(input_ids[None])[0]
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._layers()):
            attention, mlp = layer.self_attn, layer.mlp
            norm = layer.input_layernorm
            normed, residual = ops.add_rms_norm(delta, residual, norm.weight, norm.variance_epsilon)
            query = ops.qk_norm_rope_store(
                self._qkv[i](normed), attention.q_norm.weight, attention.k_norm.weight,
                attention.q_norm.variance_epsilon, cos, sin, step.positions, step.slot_mapping,
                *step.kv_cache(i),
            )  # fmt: skip
            mixed = step.attend(i, query, scale=attention.scaling, sliding_window=attention.sliding_window)
            delta = apply_linear(attention.o_proj, mixed.flatten(1), ops.linear)
            norm = layer.post_attention_layernorm
            normed, residual = ops.add_rms_norm(delta, residual, norm.weight, norm.variance_epsilon)
            if isinstance(mlp.act_fn, SILU):
                hidden = self._gate_up[i].silu_mul(normed)
            else:
                gate, up = self._gate_up[i](normed).chunk(2, dim=-1)
                hidden = mlp.act_fn(gate) * up
            delta = apply_linear(mlp.down_proj, hidden, ops.linear)
        norm = decoder.norm
        return ops.add_rms_norm(delta, residual, norm.weight, norm.variance_epsilon)[0]

    def _collect(self, *, merge: bool) -> tuple[list[Projections], list[Projections]]:
        """Every layer's q, k, v and gate, up projections as they are now; `merge` those that never were."""
        layers = list(enumerate(self._layers()))
        qkv = [self._projections(f"{i}.qkv", layer.self_attn, PROJECTIONS[:3], merge) for i, layer in layers]
        return qkv, [self._projections(f"{i}.mlp", layer.mlp, MLP_PROJECTIONS[:2], merge) for i, layer in layers]

    def _projections(self, key: str, owner: Any, names: tuple[str, ...], merge: bool) -> Projections:
        """Merge once; later look whether the parameters still are the merged ones and still lie there."""
        linears = tuple(getattr(owner, name) for name in names)
        merged = self._merged.get(key)
        if merged is None and merge and (merged := MergedWeight.of(linears)) is not None:
            self._merged[key] = merged
        intact = merged is not None and merged.belongs_to(linears)
        return Projections(linears, merged.current() if merged is not None and intact else None, self._ops)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_linear(self.model.lm_head, hidden_states, self._ops.linear)

    def own_modules(self) -> Iterator[tuple[str, torch.nn.Module, type]]:
        decoder = self.model.model
        yield "model", decoder, stock.Qwen3Model
        yield "model.rotary_emb", decoder.rotary_emb, stock.Qwen3RotaryEmbedding
        yield "model.norm", decoder.norm, stock.Qwen3RMSNorm
        for i, layer in enumerate(decoder.layers):
            name = f"model.layers.{i}"
            yield name, layer, stock.Qwen3DecoderLayer
            yield f"{name}.self_attn", layer.self_attn, stock.Qwen3Attention
            yield f"{name}.mlp", layer.mlp, stock.Qwen3MLP
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{name}.{norm}", getattr(layer, norm), stock.Qwen3RMSNorm
            for norm in ("q_norm", "k_norm"):
                yield f"{name}.self_attn.{norm}", getattr(layer.self_attn, norm), stock.Qwen3RMSNorm

    def called_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        decoder = self.model.model
        yield "model.embed_tokens", decoder.embed_tokens
        yield "lm_head", self.model.lm_head
        for i, layer in enumerate(decoder.layers):
            for projection in PROJECTIONS:
                yield f"model.layers.{i}.self_attn.{projection}", getattr(layer.self_attn, projection)
            for projection in MLP_PROJECTIONS:
                yield f"model.layers.{i}.mlp.{projection}", getattr(layer.mlp, projection)

    def replaced_functions(self) -> Iterator[tuple[Any, Any]]:
        return ((getattr(stock, name), original) for name, original in REPLACED_FUNCTIONS.items())

    def constants(self) -> tuple:
        decoder = self.model.model
        layers = [
            (a.scaling, a.sliding_window, a.head_dim, a.q_norm.variance_epsilon, a.k_norm.variance_epsilon,
             layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon,
             type(layer.mlp.act_fn).__qualname__)
            for layer in self._layers() for a in (layer.self_attn,)
        ]  # fmt: skip
        return decoder.norm.variance_epsilon, decoder.rotary_emb.attention_scaling, tuple(layers)

    def constants_reason(self) -> str | None:
        config = self.model.config
        if not self._layers():
            return "the model has no layers"
        if not getattr(config, "is_causal", True):
            return "config.is_causal is False"
        for i, layer in enumerate(self._layers()):
            attention, act = layer.self_attn, layer.mlp.act_fn
            window = config.sliding_window if config.layer_types[i] == "sliding_attention" else None
            if attention.sliding_window != window:
                return f"layer {i} has sliding_window={attention.sliding_window}, its config {window}"
            if attention.q_norm.variance_epsilon != attention.k_norm.variance_epsilon:
                return f"layer {i}'s q_norm and k_norm have different epsilons"
            if not attention.is_causal or attention.layer_idx != i:
                return f"layer {i}'s attention is not causal, or not layer {i}'s"
            if type(act) not in ELEMENTWISE or not is_own_code(type(act).forward):
                return f"layer {i}'s activation is a {type(act).__module__}.{type(act).__name__}"
        return None

    @property
    def vocab_size(self) -> int:
        return self.model.model.embed_tokens.weight.shape[0]

    def _layers(self) -> list[Any]:
        # A list first: a slice of a ModuleList registers every layer again, in every step.
        return list(self.model.model.layers)[: self.model.config.num_hidden_layers]
