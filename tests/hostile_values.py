"""Every field of a `GenerationConfig` with values that no caller should give it."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from hf_paged.options import table

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
VALUES: list[Any] = [
    2**31 - 1, 2**31, 2**63, 2**70, -(2**31) - 1, -(2**70), 10**400, -1, 0, 1, True, False,
    float("nan"), float("inf"), -float("inf"), 1e300, 1e-300, 0.5, -0.5, "", "x", [], [[]], {}, object(),
    [2**40], [2**70], [-1], [0.5], [[2**40]], [[2**70]], [[-1]], [[1], 2],
    (2**70, 1.1), (1, 1e300), (0, float("nan")), (-(2**40), 1.1), (0, -2.0),
    [[[1], float("nan")]], [[[1], 1e300]], [[[1], float("inf")]], [[[2**40], 1.0]], [[[], 1.0]],
]
# Stock takes as much memory or time as these say (rows, lists of an n-gram's length, drafts), and dies of it.
SIZES = (
    "num_return_sequences", "num_beams", "num_beam_groups", "encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens",
)
# Compiling takes minutes; stock leaves the model with fewer layers.
LEFT_OUT = ("compile_config", "assistant_early_exit")
FEW = [2**70, -1, float("nan"), "x", [[]], object()]  # for options that the engine does not read
FIELDS = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in LEFT_OUT)


def values_of(field: str) -> list[Any]:
    """The values for one of `FIELDS`."""
    if field in SIZES:
        return [value for value in FEW if value != 2**70]
    return VALUES if field in table.names(table.NATIVE) else FEW
