"""Models with a planted fault are not proved, or to the length from which the fault shows; harmless changes are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_paged.models.proof import calls, prove
from hf_paged.models.proof.mask_kinds import MaskKind, mask_kind
from tests.models.proof.planted import CONTROLS, FAULTS, planted, small_llama

CORE = {"mean over rows x 1e-9", "capacity of 512", "dropout in eval mode", "ALiBi in the mask",
        "temperature by cache length, from the config", "mixing in bfloat16 alone", "mixing in large models alone",
        "other after 40 calls", "temperature by cache length, from a product", "masks of 20 tokens",
        "an argument for odd tokens alone", "an argument for large models alone",
        "steps of just 3,000 tokens", "compiled code for more than 9,000 tokens"}


def test_the_table_is_whole():
    assert len(FAULTS) == 57 and len(CONTROLS) == 12  # two more faults are of the engine: its windows
    assert {change.name for change in (*FAULTS, *CONTROLS)} >= CORE


@pytest.mark.parametrize("change", [
    pytest.param(change, id=change.name, marks=() if change.name in CORE else pytest.mark.slow)
    for change in (*FAULTS, *CONTROLS)
])
def test_a_change_gets_its_verdict(change, tmp_path):
    verdict = prove(planted(change, tmp_path), small_llama(**change.config))
    assert (verdict.outcome, verdict.max_length) == (change.outcome, change.max_length), verdict
    assert change.reason in verdict.reason
    assert bool(verdict.reason) == (verdict.outcome != "proved")


@pytest.mark.parametrize("error", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_a_window_of_the_engine_that_is_off_by_one_ends_the_proof_at_the_window(error, tmp_path, monkeypatch):
    def off(function, heads, farthest):
        kind = mask_kind(function, heads, farthest)
        return MaskKind(kind.name, kind.size and kind.size + error)

    change = next(change for change in CONTROLS if change.name == "masks of 20 tokens")
    model_class = planted(change, tmp_path)
    assert prove(model_class, small_llama(sliding_window=300)).outcome == "proved"
    monkeypatch.setattr(calls, "mask_kind", off)
    verdict = replace(prove(model_class, small_llama(sliding_window=301, max_position_embeddings=513)), seconds=0.0)
    assert (verdict.outcome, verdict.max_length) == ("proved", 299)
