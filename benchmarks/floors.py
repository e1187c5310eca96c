"""Compute the least time that a workload can take on a device, from its own bytes and FLOPs.

    seconds = prefill + decode
    prefill = max(FLOPs / GEMM rate, bytes of the weights / copy rate), with
              FLOPs = 2 x (weights of the layers) x (prompt tokens computed) + 2 x (weights of the head) x prompts
                    + 4 x layers x query heads x head_dim x (keys that each computed token sees)
    decode  = sum over the steps of max(bytes of the weights / copy rate, 2 x weights x rows / GEMM rate)
                                  + bytes of K and V read / copy rate

Step i (from 1) has the rows whose output is longer than i; such a row reads prompt + i tokens of K and V in every
layer (its first output token comes from the prefill). All requests run at once, each prompt or prefix is computed
once, a warm prefix not at all. K and V that several rows share count once a step in `floor`, once a row in
`floor_unshared`, which is for engines that do not read shared prefixes together (one that stays in L2 can beat it).
Copy rate: read + write, measured in the same run, as is the GEMM rate. Host, sampling, activations and launches count
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import Qwen3Config
from workloads import Workload


class Floor(NamedTuple):
    """Seconds by part; ``kv`` once a step for what rows share, ``kv_unshared`` once a row."""

    prefill: float
    weights: float
    kv: float
    kv_unshared: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.weights + self.kv

    @property
    def seconds_unshared(self) -> float:
        return self.prefill + self.weights + self.kv_unshared


class Costs(NamedTuple):
    """Of a model: weights in its layers and in its head, FLOPs for a token and a key that it sees, bytes of a token's
    keys and values."""

    in_layers: int
    head: int
    flops_of_key: int
    kv_bytes: int

    def flops(self, start: int, end: int, sampled: int) -> int:
        """Of a prompt's tokens from position `start` to `end`, with the logits of so many."""
        seen = (end * (end + 1) - start * (start + 1)) // 2
        return 2 * self.in_layers * (end - start) + 2 * self.head * sampled + self.flops_of_key * seen


def costs_of(config: Qwen3Config, itemsize: int) -> Costs:
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    attention = config.hidden_size * width * (2 * heads + 2 * config.num_key_value_heads)
    in_layers = layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    kv_bytes = 2 * layers * config.num_key_value_heads * width * itemsize
    return Costs(in_layers, config.vocab_size * config.hidden_size, 4 * layers * heads * width, kv_bytes)


def floor(workload: Workload, config: Qwen3Config, itemsize: int, ceilings: dict[str, float]) -> Floor:
    copy, gemm = ceilings["copy_tb_s"] * 1e12, ceilings["gemm_tflop_s"] * 1e12
    costs = costs_of(config, itemsize)
    in_layers, head, _, kv_bytes = costs
    weight_bytes = (in_layers + head) * itemsize

    flops = 0
    for i, prompt in enumerate(workload.prompts):
        cached = workload.shared if i or workload.warm else 0
        flops += costs.flops(cached, len(prompt), 1)
    prefill = max(flops / gemm, weight_bytes / copy)

    weights, read, read_unshared = 0.0, 0, 0
    for i in range(1, max(workload.output_lengths)):
        rows = [len(p) for p, n in zip(workload.prompts, workload.output_lengths, strict=True) if n > i]
        count = len(rows) * workload.samples
        weights += max(weight_bytes / copy, 2 * (in_layers + head) * count / gemm)
        read_unshared += (sum(rows) + len(rows) * i) * workload.samples
        own = sum(rows) - len(rows) * workload.shared  # samples of one prompt share all of it
        read += own + workload.shared + count * i
    return Floor(prefill, weights, read * kv_bytes / copy, read_unshared * kv_bytes / copy)


def measure_ceilings(device: str) -> dict[str, float]:
    """Copy bandwidth (read + write) in TB/s and GEMM rate in TFLOP/s: bf16 on a GPU, fp32 on a CPU."""
    if device == "cuda":
        from kernel_speed import ceilings

        return ceilings()
    source, n = torch.ones(1 << 24), 768
    a, target = torch.randn(n, n), torch.empty_like(source)
    copy = 2 * 4 * source.numel() / _fastest(lambda: target.copy_(source)) / 1e12
    return {"copy_tb_s": copy, "gemm_tflop_s": 2 * n**3 / _fastest(lambda: a @ a) / 1e12}


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
