"""Models of derived classes over ranks: greedy tokens and log-probabilities of the whole model in stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from derived_models import CLASSES, HALF_ROTARY, LATENT, ROUTED, assert_scored_as_stock, derived_model
from derived_rank_checks import PROMPTS
from ranks import run_ranks
from safetensors.torch import save_file

from hf_paged import PagedGenerator, UnsupportedModelError

# Classes with what their plans do with attention: heads are cut, or of queries alone, or gathered, or on each rank.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "parallel residual, scaled logits": ("Cohere", {"logit_scale": 0.3}, (2, 1)),
    "windows by layer": ("Cohere2", CLASSES["Cohere2"][0], (2, 1)),
    "biases": ("Starcoder2", CLASSES["Starcoder2"][1], (2, 1)),
    "one head of keys": ("Phi", {"num_key_value_heads": 1, "rope_parameters": HALF_ROTARY}, (2, 1)),
    "numbers of heads in modules": ("GPTJ", {"rotary_dim": 8}, (2, 2)),
    "gathered heads, experts": ("Olmoe", CLASSES["Olmoe"][1], (4, 2)),
    "whole attention, experts": ("DeepseekV3", CLASSES["DeepseekV3"][0], (4, 4)),
    "cut latents": ("DeepseekV2", LATENT | ROUTED | {"v_head_dim": 32, "first_k_dense_replace": 1}, (2, 2)),
    "shared experts": ("Glm4Moe", CLASSES["Glm4Moe"][1], (2, 1)),
    "scaled, tied embedding": ("Gemma", CLASSES["Gemma"][1], (2, 1)),
    "capped logits, padded vocabulary": ("VaultGemma", CLASSES["VaultGemma"][0] | {"vocab_size": 250}, (2, 1)),
    "family that is no class of the plan's": ("Granite", {"logits_scaling": 2.0, "residual_multiplier": 0.7}, (2, 1)),
}
REFUSED = {
    "without a plan": ("StableLm", {}, "StableLmForCausalLM cannot be sharded over several ranks: transformers has no "
                                       "tensor-parallel plan"),
    "norms of heads": ("Cohere", {"use_qk_norm": True}, "is not proved to run on the paged engine: a rank's part does "
                                                        "not run (RuntimeError: "),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found, by case."""
    cases = [(name, settings) for name, settings, _ in [*CASES.values(), *REFUSED.values()]]
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    by_rank = run_ranks("derived_rank_checks:compare_with_stock", 2, cases, folder, timeout=400)
    return dict(zip([*CASES, *REFUSED], map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_rank_gives_stocks_tokens_and_log_probabilities(found: dict[str, list[Any]], case: str) -> None:
    assert found[case] == [(True, True, CASES[case][2])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proved_over_ranks_is_refused_on_each(found: dict[str, list[Any]], case: str) -> None:
    assert all(isinstance(reason, str) and REFUSED[case][2] in reason for reason in found[case]), found[case]


@pytest.mark.core
def test_a_generator_runs_a_derived_class(tmp_path: Path) -> None:
    model = derived_model("Starcoder2", CLASSES["Starcoder2"][0])
    model.save_pretrained(tmp_path)
    with PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2, device="cpu", num_blocks=64) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=6, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)
        assert len(completion.token_ids) == 6


@pytest.mark.slow
def test_a_generator_refuses_a_class_before_it_reads_weights(tmp_path: Path) -> None:
    derived_model("Cohere", {"use_qk_norm": True}).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"over 2 ranks: CohereForCausalLM is not proved"):
        PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2, device="cpu")
