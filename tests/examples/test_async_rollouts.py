"""examples/async_rollouts.py: training beside rollouts leaves whole records, and ended requests reach their ends."""

from __future__ import annotations

from pathlib import Path

from module_files import load_module

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "async_rollouts.py"


def test_it_runs_and_every_token_has_its_version_and_log_probability(capsys):
    example = load_module(EXAMPLE)
    example.UPDATES = 2
    rollouts, resumed = example.main()
    for made in rollouts + resumed:
        assert made.finish_reason in ("eos", "length")
        assert len(made.token_ids) == len(made.logprobs) == len(made.weight_versions)
        assert made.weight_versions == sorted(made.weight_versions)
        assert all(score <= 0 for score in made.logprobs)
    assert len(rollouts) >= 2 * example.BATCH
    assert len(resumed) > example.IN_FLIGHT // 2
    assert {version for made in rollouts + resumed for version in made.weight_versions} >= {0, 1}
    mixed = [made for made in rollouts if len(set(made.weight_versions)) > 1]
    assert len(mixed) >= example.IN_FLIGHT // 2  # under way at an update: what the program is there to show
    printed = capsys.readouterr().out
    assert "update 2, from tokens of versions [0" in printed
    assert f"{len(mixed)} of them over more than one version" in printed
    assert f"weight_versions={mixed[0].weight_versions}" in printed
