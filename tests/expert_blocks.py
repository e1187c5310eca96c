"""Blocks of experts with random weights, alone, and what is read of them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from hf_paged.kernels.experts.route import new_arrivals
from hf_paged.models.experts import read_experts

SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "num_experts_per_tok": 3}
GROUPED = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 2}
CONFIGS = {
    "qwen3-moe": (Qwen3MoeConfig, {"num_experts": 16, "norm_topk_prob": True}),
    "qwen3-moe without norm": (Qwen3MoeConfig, {"num_experts": 16, "norm_topk_prob": False}),
    "olmoe": (OlmoeConfig, {"num_experts": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 12}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 16}),
    "glm4-moe": (Glm4MoeConfig, {"n_routed_experts": 16} | GROUPED),
    "deepseek-v3": (DeepseekV3Config, {"n_routed_experts": 16} | GROUPED | LATENT),
    "minimax-m2": (MiniMaxM2Config, {"num_local_experts": 16}),
    "qwen2-moe": (Qwen2MoeConfig, {"num_experts": 16, "shared_expert_intermediate_size": 32}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {"num_experts": 16, "shared_expert_intermediate_size": 32}),
    "granite-moe": (GraniteMoeConfig, {"num_local_experts": 16}),
}


def block_of(name, dtype=torch.bfloat16, ties=False):
    """A block of random weights; ``ties``: of which two experts are alike each."""
    kind, settings = CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        config = kind(**(SHAPE | settings))
        if name == "qwen3.5-moe":
            block = Qwen3_5MoeSparseMoeBlock(config).eval()
            config._experts_implementation = "grouped_mm"
        else:
            model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
            layer = model.eval().model.layers[0]
            block = layer.block_sparse_moe if name == "granite-moe" else layer.mlp
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.normal_(0.0, 0.3)
            for buffer in block.buffers():
                buffer.uniform_(0.0, 0.5)
            for tensor in (*router_of(block).parameters(), *block.buffers(), *block.experts.parameters()):
                if ties:
                    tensor.copy_(tensor[torch.arange(len(tensor)) // 2 * 2])
    for parameter in block.parameters():  # the correction stays float32, as `from_pretrained` has it
        parameter.data = parameter.data.to(dtype)
    return block


def router_of(block):
    return getattr(block, "gate", None) or block.router


def rows_of(count, dtype=torch.bfloat16):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count)).to(dtype)


def parts_of(block, dtype=torch.bfloat16, **options):
    return read_experts(block, "batched_mm", dtype, new_arrivals(torch.device("cpu")), **options)
