"""Dense Qwen3: the decoder's loop over its own modules, on packed tokens, with paged attention.

Follows `Qwen3Model.forward`, `Qwen3DecoderLayer.forward` and `Qwen3Attention.forward` of transformers 5.17 to 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.models.qwen3 import modeling_qwen3 as stock

from hf_paged.integration.models.adapter import Attend, KVSpec, ModelAdapter

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Qwen3Adapter(ModelAdapter):
    model_class = stock.Qwen3ForCausalLM

    def kv_spec(self) -> KVSpec:
        config, weight = self.model.config, self.model.model.embed_tokens.weight
        head_dim = self.model.model.layers[0].self_attn.head_dim
        return KVSpec(len(self._layers()), config.num_key_value_heads, head_dim, weight.dtype, weight.device)

    def max_length(self) -> int:
        # "dynamic" and "longrope" change their frequencies with the longest sequence of the batch: below the
        # original length they do not, and a longer request goes to stock.
        parameters = self.model.config.rope_parameters
        length = self.model.config.max_position_embeddings
        if parameters["rope_type"] == "longrope":
            length = min(length, parameters.get("original_max_position_embeddings") or length)
        return length

    def hidden_states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        decoder = self.model.model
        hidden = decoder.embed_tokens(input_ids[None])
        cos, sin = decoder.rotary_emb(hidden, position_ids[None])
        for layer in self._layers():
            attention = layer.self_attn
            residual, normed = hidden, layer.input_layernorm(hidden)
            heads = (1, normed.shape[1], -1, attention.head_dim)
            query = attention.q_norm(attention.q_proj(normed).view(heads))
            key = attention.k_norm(attention.k_proj(normed).view(heads))
            value = attention.v_proj(normed).view(heads)
            query, key = stock.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
            mixed = attend(attention.layer_idx, query[0], key[0], value[0],
                           scale=attention.scaling, sliding_window=attention.sliding_window)  # fmt: skip
            hidden = residual + attention.o_proj(mixed.reshape(1, mixed.shape[0], -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return decoder.norm(hidden)[0]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden_states[None])[0]

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

    def _layers(self) -> Any:
        return self.model.model.layers[: self.model.config.num_hidden_layers]
