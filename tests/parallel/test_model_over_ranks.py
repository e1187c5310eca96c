"""A model over several processes: stock's forward on its sharded layers, and `enable` with the adapters on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import family_model
from rank_checks import NEW_TOKENS
from ranks import run_ranks
from support import tiny_model

# Vocabularies that no size divides, one larger than the sampler's groups; a tied head; fewer KV heads than ranks.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-moe-mixed", {}),
    ("qwen3-moe", {"vocab_size": 5000}),
    ("llama-3", {"vocab_size": 250}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("mistral", {"num_key_value_heads": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_generate_give_what_one_process_gives(size: int, tmp_path: Path) -> None:
    cases = []
    for i, (variant, overrides) in enumerate(CASES):
        family_model(variant, **overrides).save_pretrained(tmp_path / str(i))
        cases.append((variant, overrides, str(tmp_path / str(i))))
    if size == 2:
        found = run_ranks("rank_checks:compare_and_refuse", size, cases)
        results = [compared for compared, _, _ in found]
        check_refusals([reasons for _, reasons, _ in found])
        for _, _, drawn in found:
            assert all(ours == stock for ours, stock in drawn), drawn
    else:
        results = run_ranks("rank_checks:compare_with_stock", size, cases)
    assert len(results) == size
    for rank, found in enumerate(results):
        for (variant, overrides, _), one in zip(cases, found, strict=True):
            vocab_size = overrides.get("vocab_size", 256)
            kv_heads = max(1, overrides.get("num_key_value_heads", 2) // size)
            assert one.pop("error") < 1e-5, variant
            assert one == {
                "same_tokens": True, "new_tokens": NEW_TOKENS, "own_columns": True, "logits_shape": (30, vocab_size),
                "vocab_size": vocab_size, "group": (rank, size), "kv_heads": kv_heads,
            }, variant


def check_refusals(found: list[dict[str, str | None]]) -> None:
    """Models that are sharded by other means go to stock, with the supported route in the reason."""
    for reasons in found:
        assert reasons["FSDP2"] is None  # see test_sharded_trainers
        for name, word in {"flat": "FSDP", "original": "FSDP", "DTensor": "DTensor"}.items():
            assert word in str(reasons[name]), name
            assert "PagedGenerator.from_pretrained(..., tensor_parallel_size=N)" in str(reasons[name]), name


@pytest.mark.slow
def test_a_rank_may_look_at_more_steps_in_dry_runs_than_another(tmp_path: Path) -> None:
    """Which come to no collective: else ranks would wait for each other, or sum what does not belong together."""
    tiny_model(num_key_value_heads=2, vocab_size=2600).save_pretrained(tmp_path)
    [[plain, dry], other] = run_ranks("rank_checks:dry_runs_between", 2, str(tmp_path))
    assert plain == dry and other == [plain, dry] and len(plain) == 3


@pytest.mark.slow
def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 ended with 1:(.|\n)*in fails(.|\n)*ValueError: on purpose by"):
        run_ranks("rank_checks:fails", 1)


@pytest.mark.slow
def test_ranks_that_run_one_script_update_their_weights_together(tmp_path: Path) -> None:
    """What becomes of a running request is what becomes of it on one rank, whichever way it goes on."""
    tiny_model(num_key_value_heads=2).save_pretrained(tmp_path)
    # Two ranks agree on when in the commit of a further step.
    [alone] = run_ranks("rank_checks:updated_while_it_runs", 1, str(tmp_path), [8, 17])
    assert run_ranks("rank_checks:updated_while_it_runs", 2, str(tmp_path), [7, 15]) == [alone, alone]
    assert [versions for _, versions in alone] == [[0] * 8 + [1] * 9 + [2] * 7] * 2
    assert alone[0][0][:8] == alone[1][0][:8]
    assert alone[0] != alone[1]
