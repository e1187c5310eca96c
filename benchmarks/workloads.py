"""The workloads that engines are compared on, with exactly the draws of the figures published for the peers."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


class Workload(NamedTuple):
    """Requests as (prompt token ids, output tokens); EOS is ignored. temperature 0: greedy."""

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float


def nano() -> Workload:
    """nano-vllm's bench: 142,827 prompt and 133,966 output tokens in 256 ragged requests."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    return Workload(prompts, [random.randint(100, 1024) for _ in range(256)], 0.6)


def single() -> Workload:
    """One request, 128 prompt and 512 output tokens, greedy."""
    random.seed(0)
    return Workload([[random.randint(0, 10000) for _ in range(128)]], [512], 0.0)


WORKLOADS = {"nano": nano, "single": single}

# Published shapes of the dense Qwen3 family; weights are random, since speed does not depend on them.
QWEN3_SHAPES: dict[str, dict] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
}  # fmt: skip


def qwen3(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 of published shapes with random weights, made on the device."""
    config = Qwen3Config(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **QWEN3_SHAPES[size])  # fmt: skip
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    return model.eval()
