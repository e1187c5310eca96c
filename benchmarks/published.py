"""Figures of the peers on one H200: output tokens per second by (workload, model)."""

from __future__ import annotations

# Measured on 2026-11-20 with vLLM 0.24 and transformers 5.17; keys are the engines' names in run_all.py.
PEERS: dict[tuple[str, str], dict[str, int]] = {
    ("nano", "0.6B"): {"stock": 1_060, "generate_batch": 12_100, "nano-vllm": 20_957, "vllm": 23_350},
    ("nano", "8B"): {"vllm": 9_100},
    ("single", "0.6B"): {"vllm": 600},
    ("single", "8B"): {"vllm": 192},
    ("warm-prefix", "0.6B"): {"vllm": 16_200},
    ("warm-prefix", "8B"): {"vllm": 8_400},
    ("no-prefix", "0.6B"): {"vllm": 5_911},
    ("no-prefix", "8B"): {"vllm": 1_095},
    ("shared-decode", "0.6B"): {"vllm": 10_877},
    ("shared-decode", "8B"): {"vllm": 7_000},
    ("rollouts", "0.6B"): {"vllm": 37_000},
    ("rollouts", "8B"): {"vllm": 17_850},
}
