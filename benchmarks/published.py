"""What the peers reach on one H200 and what issue 3 asks for, output tokens per second by (workload, model)."""

from __future__ import annotations

# Of ../shared/PEERS.md, measured on 2026-11-20; keys are the engines' names in run_all.py.
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

# (must, aim) of issue 3; None: the issue names none.
TARGETS: dict[tuple[str, str], tuple[int, int | None]] = {
    ("nano", "0.6B"): (27_000, 31_000),
    ("nano", "8B"): (9_700, 10_600),
    ("single", "0.6B"): (800, 1_400),
    ("single", "8B"): (205, 240),
    ("warm-prefix", "0.6B"): (16_500, None),
    ("warm-prefix", "8B"): (8_500, None),
    ("no-prefix", "0.6B"): (6_000, 7_200),
    ("no-prefix", "8B"): (1_100, 1_220),
    ("rollouts", "0.6B"): (40_000, None),
    ("rollouts", "8B"): (18_500, None),
}
