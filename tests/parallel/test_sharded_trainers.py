"""A model that FSDP2 spread over two gloo processes: each generates its own prompts, what stock generates there.

`fsdp_checks.py` has what the two do; one pair of processes does it all, and each test looks at what came of one check.
"""

from __future__ import annotations

from typing import Any

import fsdp_checks
import pytest
from pairs import slow_but
from ranks import run_ranks

TRAINED = {"tokens": True, "losses": True, "state": True, "native": True, "class": True, "attributes": True}
# Checks of which both ranks have to find this.
EXPECTED: dict[str, Any] = {
    "full_precision": TRAINED,
    "mixed_precision": TRAINED,
    "tied_embeddings": TRAINED,
    "uneven_rows": TRAINED,
    "layers_alone": True,
    "units_as_accelerate_makes_them": TRAINED,
    "generic_family": TRAINED,
    "derived_classes": [TRAINED, TRAINED],
    "hybrid_meshes": [TRAINED, TRAINED],
    "offloaded": TRAINED,
    "enabled_first": True,
    "under_autocast": True,
    "whole_for_a_while": True,
    "adapters": True,
    # At first, after rank 1's change, and after the memory was given back.
    "gathers_after_changes": ([1, 0, 1, 0, 1], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
    "stocks_loop_over_pages": (True, 3),
    "prompt_lookup_in_lockstep": [True, True],
    "other_entrances": [True, True, True],
    "wrapped_in_ddp": True,
    "accelerates_plugin": [True, True, True, True, True, True, 3],
}


CORE = ("full_precision", "gathers_after_changes")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What the ranks found, by check. Where only tests of the core tier run, so do only their checks."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = fsdp_checks.CHECKS if any(item.get_closest_marker("slow") for item in tests) else CORE
    by_rank = run_ranks("fsdp_checks:run_all", 2, list(names), timeout=500)
    return {name: [of_rank[name] for of_rank in by_rank] for name in names}


@pytest.mark.parametrize("name", slow_but(EXPECTED, *CORE))
def test_each_rank_finds(found: dict[str, list[Any]], name: str) -> None:
    for rank, result in enumerate(found[name]):
        assert result == EXPECTED[name], f"rank {rank}:\n{result}"


@pytest.mark.slow
def test_a_rank_alone_gets_an_error_in_time_and_goes_on(found: dict[str, list[Any]]) -> None:
    (first, again, error), other = found["alone"]
    assert (first, again) == (True, True) and other == (True, True, None)
    name, text, seconds = error
    assert name == "RankAloneError" and 0.5 <= seconds < 10
    assert "rank 1 did not come within 0.5 seconds (PagedConfig.gather_timeout)" in text
    assert "call generate equally often" in text and "hf_paged.gathered(model)" in text


@pytest.mark.slow
def test_a_call_runs_in_stock_on_all_ranks_or_on_none(found: dict[str, list[Any]]) -> None:
    for rank, (equal, later, num_stock, num_native, texts) in enumerate(found["in_stock_together"]):
        assert equal and later and (num_stock, num_native) == (1, 1)
        why = "output_attentions=True" if rank == 0 else "runs in stock on another rank"
        assert len(texts) == 1 and why in texts[0]


@pytest.mark.slow
def test_a_strict_rank_ends_the_call_of_both(found: dict[str, list[Any]]) -> None:
    (own, from_other), (told, own_of_other) = found["strict_on_one"]
    assert own[0] == "FallbackError" and own[1].startswith("strict=True, and this call would go to stock generate")
    assert told[0] == "RankAloneError" and "rank 0 raised FallbackError: strict=True" in told[1]
    for name, text, _ in (from_other, own_of_other):
        assert name == "FallbackError" and "strict=True on a rank of this sharded model" in text
    assert all(seconds < 10 for *_, seconds in (own, from_other, told, own_of_other))


@pytest.mark.slow
def test_a_rank_without_memory_tells_the_other(found: dict[str, list[Any]]) -> None:
    ((name, text, seconds), later), (own, own_later) = found["no_memory_on_one"]
    assert name == "RankAloneError" and "rank 1 raised OutOfMemoryError: no room for the weights" in text
    assert seconds < 10 and own[0] == "OutOfMemoryError" and later and own_later


@pytest.mark.slow
def test_a_rank_that_raises_before_a_call_begins_tells_the_other(found: dict[str, list[Any]]) -> None:
    own, other = found["errors_of_arguments"]
    assert all(seconds < 10 for name, _, seconds in [*own[:6:2], *other[:6:2], *own[6:8], *other[6:8]])
    for (name, text, _), (told, told_text, _) in zip([*own[:6:2], own[6]], [*other[:6:2], other[6]], strict=True):
        assert name not in ("nothing", "RankAloneError")
        assert told == "RankAloneError" and f"rank 0 raised {name}: {text[:20]}" in told_text
    for rank in (own, other):
        assert rank[7][:2] == ("ValueError", own[0][1]) and rank[1:6:2] == [True] * 3 and rank[8] is True


@pytest.mark.slow
def test_ranks_generate_by_themselves_inside_of_gathered(found: dict[str, list[Any]]) -> None:
    for rank, (equal, collectives, outside, errors) in enumerate(found["by_themselves"]):
        assert equal and collectives == 1
        assert outside[0] == "UnsupportedModelError" and "hf_paged.gathered(model)" in outside[1]
        if rank == 0:
            assert errors[0][0] == "FallbackError" and "output_attentions=True" in errors[0][1]
        assert errors[-1][0] == "RuntimeError" and "changed inside of hf_paged.gathered(model)" in errors[-1][1]


@pytest.mark.slow
def test_reasons_of_what_stays_in_stock(found: dict[str, list[Any]]) -> None:
    parts = {
        "split": "is cut as (_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "beside": "is a DTensor that is not fully_shard's",
        "wide": "the mixed precision policy of model.layers.0 computes in torch.bfloat16 and hands on torch.float32",
        "parts": "mixed dtypes: model.layers.0.self_attn.q_norm is torch.bfloat16, the embedding torch.float32",
        "hooked": "model.layers.0.mlp has a forward hook",
    }
    for reasons in found["refused"]:
        assert reasons.keys() == parts.keys()
        assert all(part in reasons[name] for name, part in parts.items()), reasons
