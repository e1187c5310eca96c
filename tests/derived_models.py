"""Tiny random models of classes that are no fused family."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from family_models import ALTERNATING, SHAPE, make_random
from transformers import PreTrainedModel

from hf_paged import Completion

SLIDING = {"sliding_window": 20, "layer_types": ALTERNATING}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
# Keys and values of unlike width.
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "head_dim": 8, "num_key_value_heads": 4}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
          "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [1], "no_rope_layers": [1, 0]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
          "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [1], "no_rope_layers": [1, 0]}
# Two configs of each class, by the prefix of its name.
CLASSES = {
    "Apertus": [{}, {"rope_parameters": YARN}],
    "Arcee": [{}, {"attention_bias": True, "mlp_bias": True}],
    "BioGpt": [{}, {"scale_embedding": False}],
    "CodeGen": [{"rotary_dim": 8}, {"rotary_dim": 16}],
    "Cohere": [{"logit_scale": 0.3}, {"use_qk_norm": True}],
    "Cohere2": [SLIDING, {"sliding_window": 20, "logit_scale": 2.0}],
    "Cwm": [{"bos_token_id": 1, **SLIDING}, {"bos_token_id": 1, "rope_parameters": YARN}],
    "DeepseekV2": [LATENT | ROUTED | {"first_k_dense_replace": 1}, LATENT | ROUTED | {"v_head_dim": 32}],
    "DeepseekV3": [LATENT | ROUTED | {"first_k_dense_replace": 1},
                   LATENT | ROUTED | {"first_k_dense_replace": 1, "q_lora_rank": None}],
    "Ernie4_5": [{}, {"use_bias": True}],
    "Ernie4_5_Moe": [{"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
                     {"moe_num_experts": 4, "moe_k": 1, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}],
    "Exaone4": [SLIDING, SLIDING | {"layer_types": ["full_attention"] * 2}],
    "FlexOlmo": [EXPERTS, EXPERTS | {"norm_topk_prob": True}],
    "GPTBigCode": [{}, {"multi_query": False}],
    "GPTJ": [{"rotary_dim": 8}, {"rotary_dim": 16}],
    "GPTNeoX": [{}, {"use_parallel_residual": False, "rope_parameters": HALF_ROTARY}],
    "Gemma": [{}, {"tie_word_embeddings": True}],
    "Glm4Moe": [ROUTED | {"first_k_dense_replace": 1}, ROUTED | {"first_k_dense_replace": 0, "use_qk_norm": True}],
    "GraniteMoe": [LOCAL_EXPERTS, LOCAL_EXPERTS | {"logits_scaling": 2.5, "residual_multiplier": 0.7}],
    "Helium": [{}, {"attention_bias": True}],
    "HunYuanDenseV1": [{}, {"attention_bias": True}],
    "Jais2": [{}, {"attention_bias": True}],
    "Llama4": [LLAMA4, LLAMA4 | {"use_qk_norm": False, "layer_types": ["chunked_attention"] * 2}],
    "MiniCPM3": [LATENT | {"head_dim": None}, LATENT | {"head_dim": None, "v_head_dim": 32, "scale_emb": 3}],
    "MiniMaxM2": [LOCAL_EXPERTS, LOCAL_EXPERTS | {"num_experts_per_tok": 3}],
    "NanoChat": [{}, {"final_logit_softcapping": 4.0}],
    "OPT": [{"ffn_dim": 96, "word_embed_proj_dim": 64}, {"ffn_dim": 96, "word_embed_proj_dim": 32}],
    "Olmo": [{}, {"clip_qkv": 0.5}],
    "Olmoe": [EXPERTS, EXPERTS | {"clip_qkv": 0.5, "norm_topk_prob": True}],
    "Persimmon": [{}, {"qk_layernorm": False, "rope_parameters": HALF_ROTARY}],
    "Phi": [{}, {"qk_layernorm": True, "rope_parameters": HALF_ROTARY}],
    "Qwen2Moe": [EXPERTS | {"shared_expert_intermediate_size": 32},
                 EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}],
    "SeedOss": [{}, {"attention_bias": True}],
    "StableLm": [{}, {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}],
    "Starcoder2": [{"sliding_window": 20}, {"sliding_window": None, "use_bias": True}],
    "VaultGemma": [SLIDING | {"final_logit_softcapping": 8.0}, {"attn_logit_softcapping": 4.0, **SLIDING}],
}


def derived_model(name: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = getattr(transformers, "Llama4TextConfig" if name == "Llama4" else f"{name}Config")(**(SHAPE | settings))
    model = make_random(getattr(transformers, f"{name}ForCausalLM"), config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@torch.no_grad()
def assert_scored_as_stock(model: PreTrainedModel, completion: Completion) -> None:
    """Log-probabilities of a prompt and of greedy tokens are those of a forward with the positions of `generate`."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    logits = model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits
    known = logits[0].float().log_softmax(-1)
    expected = known[:-1].gather(1, ids[0, 1:, None])[:, 0]
    found = torch.tensor([*completion.prompt_logprobs[1:], *completion.logprobs])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
