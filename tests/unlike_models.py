"""Tiny random models whose attention has chunks, values of another size than keys, or other shapes in some layers."""

from __future__ import annotations

import transformers
from derived_models import CLASSES, LATENT, ROUTED, derived_model
from family_models import SHAPE, make_random
from transformers import PreTrainedModel

LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
GEMMA4 = LAYERS | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                   "hidden_size_per_layer_input": 0}
# Four layers, of which the last two attend over keys and values of the first two.
SHARED = LAYERS | {"num_hidden_layers": 4, "layer_types": LAYERS["layer_types"] * 2, "num_kv_shared_layers": 2,
                   "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
MODELS = {
    "axk1": ("AXK1", LATENT | ROUTED | {"first_k_dense_replace": 1}),
    "deepseek-v2": ("DeepseekV2", CLASSES["DeepseekV2"][0]),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-shared": ("Gemma4", SHARED),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT | ROUTED | {"first_k_dense_replace": 1}),
    "llama4": ("Llama4", CLASSES["Llama4"][0]),
    "mimo-v2": ("MiMoV2Flash", {"v_head_dim": 24}),
    "youtu": ("Youtu", LATENT),
}


def unlike_model(name: str) -> PreTrainedModel:
    prefix, settings = MODELS[name]
    if prefix in CLASSES:
        return derived_model(prefix, settings)
    config = getattr(transformers, "Gemma4TextConfig" if prefix == "Gemma4" else f"{prefix}Config")
    model = make_random(getattr(transformers, f"{prefix}ForCausalLM"), config(**SHAPE | settings))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model
