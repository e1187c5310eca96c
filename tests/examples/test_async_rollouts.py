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
    assert "update 2 from tokens" in capsys.readouterr().out
