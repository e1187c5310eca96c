"""Config of a small clone: sizes shrink, and everything else stays (windows, scales, RoPE, kinds of layers).

What is too small for a proof's prompts, of vocabularies and positions, grows.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 16
FEWEST_LAYERS, MOST_LAYERS = 4, 8
FEWEST_POSITIONS = 160

# The size that a clone has, by the field's name. A size that is not named here makes the clone larger, not wrong.
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "out_hidden_size", "n_embd", "d_model", "embed_dim", "dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys((
        "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim",
        "dff", "intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"), 96),
    **dict.fromkeys((
        "shared_expert_intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size",
        "shared_intermediate_size", "moe_shared_expert_intermediate_size", "q_lora_rank"), 32),
    **dict.fromkeys((
        "head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim",
        "kv_channels", "qk_nope_head_dim", "kv_lora_rank", "hidden_size_per_layer_input"), HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": 24,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    # Of recurrent layers, whose inner size is twice the hidden size.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim",
                     "mamba_d_head", "ssm_state_size", "mamba_d_state", "state_size"), HEAD_SIZE),
    "mamba_headdim": HEAD_SIZE, "attention_hidden_size": 128,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
          "encoder_attention_heads", "swa_num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "swa_num_key_value_heads",
              "num_global_key_value_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "context_length", "max_seq_len")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
# What says nothing of how a model computes in float64.
_DROPPED = ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path", "torch_dtype",
            "quantization_config")


def is_size(field: str) -> bool:
    """Return whether a config's field is a size that a clone shrinks."""
    return field in _SIZES


def reduced(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same class with small sizes, and some layers of each kind that its lists tell apart."""
    return type(config)(**_reduced_values(config))


def _reduced_values(config: PreTrainedConfig) -> dict[str, Any]:
    given = config.to_dict()
    layers = _first(given, _LAYERS, len(given.get("layers_block_type") or range(FEWEST_LAYERS)))
    kept = _kept_layers(given, layers)
    small = {field: _small(config, field, value, given, layers, kept) for field, value in given.items()
             if field not in _DROPPED}
    if "qk_rope_head_dim" in given and given.get("head_dim") == given["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    small["eos_token_id"] = None
    _shrink_rope(small)
    return small


def _first(given: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    return next((given[name] for name in names if isinstance(given.get(name), int)), default)


def _small(config: PreTrainedConfig, field: str, value: Any, given: dict[str, Any], layers: int,
           kept: list[int]) -> Any:
    """Return the clone's value of a field."""
    if isinstance(inner := vars(config).get(field), PreTrainedConfig):
        return {"model_type": inner.model_type} | _reduced_values(inner)
    if isinstance(value, int) and not isinstance(value, bool):
        return _small_number(field, value, given, len(kept))
    if isinstance(value, list):
        if field.endswith("token_id"):
            return None
        if field == "attn_layer_indices":
            return value[:1] and [1]
        return [value[layer] for layer in kept] if len(value) == layers > len(kept) else value
    if field == "per_layer_config" and isinstance(value, dict):
        return {kept.index(int(layer)): {name: _small_number(name, size, given, len(kept)) for name, size in of.items()}
                for layer, of in value.items() if int(layer) in kept}
    return copy.deepcopy(value)


def _small_number(field: str, value: Any, given: dict[str, Any], layers: int) -> Any:
    if field in _LAYERS:
        return min(value, layers)
    if field == "num_heads" and "expand" in given:
        return min(value, 2 * HEADS)
    if field == "attention_head_dim" and "attention_hidden_size" in given:
        return min(value, 2 * HEAD_SIZE)
    if field == "mamba_d_ssm" and value is not None:
        return min(given["mamba_n_heads"], 2 * HEADS) * min(given["mamba_d_head"], HEAD_SIZE)
    if field == "linear_num_key_heads":
        return HEADS if value == given.get("linear_num_value_heads") else min(value, KEY_HEADS)
    if field in ("attn_layer_period", "attn_layer_offset"):
        return min(value, 2 if field.endswith("period") else 1)
    if field in _HEADS:
        return min(value, HEADS)
    if field in _KEY_HEADS:
        return HEADS if value == _first(given, _HEADS, HEADS) else min(value, KEY_HEADS)
    if field in ("embedding_size", "word_embed_proj_dim") and value == given.get("hidden_size"):
        return min(value, _SIZES["hidden_size"])  # no projection stands between them
    if field == "vocab_size":
        return VOCABULARY
    if field in _POSITIONS:
        return max(value, FEWEST_POSITIONS)
    if field == "num_kv_shared_layers":
        return min(value, 2)
    if field.endswith(("token_id", "token_index")) and value >= VOCABULARY:
        return VOCABULARY - 1 - len(field) % 5
    return min(value, _SIZES[field]) if field in _SIZES else value


def _kept_layers(given: dict[str, Any], layers: int) -> list[int]:
    """Return the numbers of layers that show two of each kind, in order."""
    lists = [value for value in given.values() if isinstance(value, list) and len(value) == layers]
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] if lists else [""] * layers
    if given.get("num_kv_shared_layers"):  # kinds alternate: each of the last layers shares with one of its kind
        other = next((layer for layer, kind in enumerate(kinds) if kind != kinds[0]), 1)
        again = [next((layer for layer in range(other + 1, layers) if kinds[layer] == kind), layers - 1)
                 for kind in (kinds[0], kinds[other])]
        return [0, other, *again]
    kept = [layer for layer, kind in enumerate(kinds) if layer < 2 or kinds[:layer].count(kind) < 2]
    if len(kept) < FEWEST_LAYERS:
        kept += [layer for layer in range(layers) if layer not in kept][: FEWEST_LAYERS - len(kept)]
    return kept[:MOST_LAYERS]


def _shrink_rope(small: dict[str, Any]) -> None:
    """Cut lists of RoPE's settings to the size of the clone's heads."""
    ropes = [value for value in small.values() if isinstance(value, dict)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
    size = small.get("head_dim") or small.get("hidden_size", HEADS * HEAD_SIZE) // HEADS
    for rope in ropes:
        pairs = int(size * rope.get("partial_rotary_factor", small.get("partial_rotary_factor", 1.0))) // 2
        for field in ("short_factor", "long_factor"):
            if isinstance(rope.get(field), list):
                rope[field] = rope[field][:pairs]
        if isinstance(given := rope.get("mrope_section"), list):
            rope["mrope_section"] = _sections(pairs, given)


def _sections(pairs: int, given: list[int]) -> list[int]:
    """Return about the shares of `given`, which sum to `pairs` of RoPE's numbers; axes that are alike stay alike."""
    sections = [max(1, pairs * share // sum(given)) for share in given]
    odd = next((axis for axis, share in enumerate(given) if given.count(share) == 1), -1)
    sections[odd] += pairs - sum(sections)
    return sections
