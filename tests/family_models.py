"""Tiny random models of usual classes, with what is special about each in reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from support import VOCAB
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 160,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROTARY = DEFAULT_ROPE | {"partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 4.0, "beta_slow": 1.0,
}


class Variant(NamedTuple):
    config: str
    settings: dict[str, Any] = {}  # noqa: RUF012


# Windows of 20 tokens are crossed by every test here.
VARIANTS = {
    "llama": Variant("LlamaConfig"),
    "llama-3": Variant("LlamaConfig", {"rope_parameters": LLAMA_3, "attention_bias": True, "mlp_bias": True}),
    "mistral": Variant("MistralConfig", {"sliding_window": 20}),
    "mistral-full": Variant("MistralConfig", {"sliding_window": None}),
    "qwen2": Variant("Qwen2Config"),
    "qwen2-sliding": Variant("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-moe": Variant("Qwen3MoeConfig", EXPERTS),
    "qwen3-moe-mixed": Variant("Qwen3MoeConfig", {
        **EXPERTS, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 20,
    }),
    "gemma2": Variant("Gemma2Config", {
        "sliding_window": 20, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 24, "layer_types": ALTERNATING,
    }),
    "gemma3": Variant("Gemma3TextConfig", {
        "sliding_window": 20, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING, "final_logit_softcapping": 8.0,
    }),
    "phi3": Variant("Phi3Config", {"sliding_window": 20}),
    "phi3-longrope": Variant("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 160}),
    "olmo2": Variant("Olmo2Config"),
    "gpt-oss": Variant("GptOssConfig", {
        "sliding_window": 20, "layer_types": ALTERNATING, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    # A layer without RoPE, one with.
    "smollm3": Variant("SmolLM3Config", {"no_rope_layers": [0, 1]}),
    "smollm3-sliding": Variant("SmolLM3Config", {
        "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 20, "layer_types": ALTERNATING,
    }),
    "granite": Variant("GraniteConfig", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.11, "residual_multiplier": 0.7, "logits_scaling": 2.5,
    }),
    "glm": Variant("GlmConfig", {"attention_bias": True, "rope_parameters": HALF_ROTARY}),
    "glm4": Variant("Glm4Config", {"attention_bias": True, "rope_parameters": HALF_ROTARY}),
    "mixtral": Variant("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-sliding": Variant("MixtralConfig", {
        "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20,
    }),
    "olmo3": Variant("Olmo3Config", {"sliding_window": 20, "layer_types": ALTERNATING}),
    "olmo3-yarn": Variant("Olmo3Config", {
        "sliding_window": 20, "layer_types": ALTERNATING,
        "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN},
    }),
    "ministral": Variant("MinistralConfig", {"sliding_window": 20, "layer_types": ALTERNATING}),
    # Queries are scaled anew at every 16th position.
    "ministral3": Variant("Ministral3Config", {"rope_parameters": YARN | {
        "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16, "max_position_embeddings": 512,
    }}),
    "ministral3-sliding": Variant("Ministral3Config", {"sliding_window": 20, "rope_parameters": YARN | {
        "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16, "max_position_embeddings": 512,
    }}),
}


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
# Image-text models: prefix of their classes, the variant that is inside, the vision tower's config.
WRAPPED = {
    "gemma3": ("Gemma3", "gemma3", "SiglipVisionConfig"),
    "mistral3": ("Mistral3", "mistral", "PixtralVisionConfig"),
    "mistral3-ministral3": ("Mistral3", "ministral3", "PixtralVisionConfig"),
    "llava": ("Llava", "llama", "CLIPVisionConfig"),
    "llava-qwen2": ("Llava", "qwen2-sliding", "CLIPVisionConfig"),
    "llava-next": ("LlavaNext", "granite", "CLIPVisionConfig"),
}


def family_model(variant: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode on the CPU, always the same for one seed and config."""
    name, settings = VARIANTS[variant]
    config = getattr(transformers, name)(**(SHAPE | settings | overrides))
    return make_random(transformers.AutoModelForCausalLM.from_config, config, seed)


def wrapped_model(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The same of an image-text model around the decoder of a family; `overrides` are of its own config."""
    prefix, text, vision = WRAPPED[name]
    kind, settings = VARIANTS[text]
    settings = {"text_config": getattr(transformers, kind)(**(SHAPE | settings)),
                "vision_config": getattr(transformers, vision)(**VISION), "image_token_id": VOCAB - 1,
                "initializer_range": SHAPE["initializer_range"], "tie_word_embeddings": False}
    config = getattr(transformers, f"{prefix}Config")(**(settings | overrides))
    model = make_random(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, seed)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def make_random(make: Callable[[Any], PreTrainedModel], config: Any, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config).eval()
        with torch.no_grad():  # biases and norm weights start as constants: a bug in how they are used would not show
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "sinks" in key:
                    parameter.normal_(0.0, 0.2 if "bias" in key else 2.0)
                elif "norm" in key:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
    return model
