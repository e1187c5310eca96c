"""Workloads that engines are compared on, with exactly the draws of the figures published for the peers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM


class Workload(NamedTuple):
    """Prompts (token ids) with their output tokens; EOS is ignored. temperature 0: greedy.

    ``samples``: completions of each prompt; ``shared``: leading tokens that all prompts have in common; ``warm``: they
    are in the prefix cache before the clock starts, and nothing else is.
    """

    prompts: list[list[int]]
    output_lengths: list[int]
    temperature: float
    samples: int = 1
    shared: int = 0
    warm: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lengths) * self.samples


def nano() -> Workload:
    """nano-vllm's bench: 142,827 prompt and 133,966 output tokens in 256 ragged requests."""
    random.seed(0)
    prompts = [_tokens(random.randint(100, 1024)) for _ in range(256)]
    return Workload(prompts, [random.randint(100, 1024) for _ in range(256)], 0.6)


def single() -> Workload:
    """One request, 128 prompt and 512 output tokens, greedy."""
    random.seed(0)
    return Workload([_tokens(128)], [512], 0.0)


def long(prompt: int = 131_072) -> Workload:
    """One prompt of 128k tokens, 128 output tokens, greedy."""
    random.seed(0)
    return Workload([_tokens(prompt)], [128], 0.0)


def long_prompts(requests: int, shortest: int, longest: int) -> Workload:
    """Prompts of so many tokens, 64 output tokens of each, temperature 0.6."""
    random.seed(0)
    return Workload([_tokens(random.randint(shortest, longest)) for _ in range(requests)], [64] * requests, 0.6)


def short(requests: int = 2048) -> Workload:
    """Requests of 16 to 128 prompt and 8 to 48 output tokens, temperature 0.6."""
    random.seed(5)
    prompts = [_tokens(random.randint(16, 128)) for _ in range(requests)]
    return Workload(prompts, [random.randint(8, 48) for _ in prompts], 0.6)


def with_prefix(shared: int, own: int, output: int, *, warm: bool = False, requests: int = 256) -> Workload:
    """Requests of ``shared`` common and ``own`` own prompt tokens."""
    random.seed(0)
    prefix = _tokens(shared)
    return Workload([prefix + _tokens(own) for _ in range(requests)], [output] * requests, 0.6, 1, shared, warm)


def rollouts(prompts: int = 32, prompt: int = 512) -> Workload:
    """16 samples of 512 tokens of each prompt, temperature 1."""
    random.seed(0)
    return Workload([_tokens(prompt) for _ in range(prompts)], [512] * prompts, 1.0, samples=16)


def uniform(batch: int, prompt: int = 256, output: int = 128) -> Workload:
    """``batch`` equal requests, so that no cliff hides between the other workloads' batch sizes."""
    random.seed(0)
    return Workload([_tokens(prompt) for _ in range(batch)], [output] * batch, 0.6)


def _tokens(count: int) -> list[int]:
    return [random.randint(0, 10000) for _ in range(count)]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nano": nano,
    "single": single,
    "short": short,
    "warm-prefix": partial(with_prefix, 2048, 64, 64, warm=True),
    "no-prefix": partial(with_prefix, 0, 2112, 64),
    "prompts-7k": partial(long_prompts, 64, 2_000, 7_000),
    "prompts-30k": partial(long_prompts, 8, 30_000, 30_000),
    "shared-decode": partial(with_prefix, 4096, 64, 512),
    "shared-decode-16k": partial(with_prefix, 16384, 64, 512),
    "rollouts": rollouts,
    "rollouts-2k": partial(rollouts, prompt=2048),
    "group": partial(rollouts, 1, 2048),
    "long": long,
}


def make_workload(name: str, scale: float = 1.0) -> Workload:
    """A workload by name, or "batch N" for `uniform`; ``scale`` below 1 makes fewer and shorter requests of it."""
    made = uniform(int(name.split()[1])) if name.startswith("batch ") else WORKLOADS[name]()
    if scale >= 1.0:
        return made
    count, shared = _scaled(len(made.prompts), scale), int(made.shared * scale)
    prompts = [p[:shared] + p[made.shared :][: _scaled(len(p) - made.shared, scale)] for p in made.prompts[:count]]
    lengths = [max(2, _scaled(n, scale)) for n in made.output_lengths[:count]]
    return made._replace(prompts=prompts, output_lengths=lengths, samples=_scaled(made.samples, scale), shared=shared)


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))


def limits(workload: Workload) -> dict[str, int]:
    """The field of `PagedConfig` that sequences need which are longer than the models' positions."""
    longest = max(len(p) + n for p, n in zip(workload.prompts, workload.output_lengths, strict=True))
    return {"max_model_len": longest} if longest > POSITIONS else {}


def generation_configs(workload: Workload) -> list[GenerationConfig]:
    """One config per prompt; ``num_return_sequences`` stands for the samples."""
    options: dict[str, Any] = {"num_return_sequences": workload.samples} if workload.samples > 1 else {}
    if workload.temperature:
        options |= {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
    return [GenerationConfig(max_new_tokens=n, **options) for n in workload.output_lengths]


# Published shapes of the dense Qwen3 family; weights are random, since speed does not depend on them.
QWEN3_SHAPES: dict[str, dict] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "tie_word_embeddings": False},
    # Published by nobody: small enough for a CPU.
    "26M": {"vocab_size": 14336, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64,
            "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    # Shows on a CPU that a benchmark runs.
    "tiny": {"vocab_size": 10016, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


POSITIONS = 40960
# For long texts the model cards recommend this, beside the same `max_position_embeddings`.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def qwen3_config(size: str, rope: dict[str, Any] | None = None) -> Qwen3Config:
    shape = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128} | QWEN3_SHAPES[size]
    parameters = {"rope_theta": 1e6} | (rope or {"rope_type": "default"})
    return Qwen3Config(max_position_embeddings=POSITIONS, rope_parameters=parameters, eos_token_id=None,
                       bos_token_id=None, **shape)


def qwen3(size: str, dtype: torch.dtype, device: str, seed: int = 0,
          rope: dict[str, Any] | None = None) -> Qwen3ForCausalLM:
    """A Qwen3 of published shapes with random weights, made on the device."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(qwen3_config(size, rope))
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    return model.eval()
