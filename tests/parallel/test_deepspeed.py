"""DeepSpeed's ZeRO-3 over two processes, inside of the context in which TRL gathers the parameters."""

from __future__ import annotations

import pytest
from ranks import run_ranks


@pytest.mark.slow
def test_rollouts_are_native_and_training_goes_on_as_without() -> None:
    pytest.importorskip("deepspeed")
    for found in run_ranks("deepspeed_checks:train_and_generate", 2, timeout=400):
        assert found["outside"][0] == "the parameters are partitioned by DeepSpeed"
        assert "deepspeed.zero.GatheredParameters" in found["outside"][0].remedy
        assert "has a forward hook" in found["with_hooks"][0]
        assert found["equal"] == (True, True, True)  # tokens, losses, weights
        assert found["in_stock"] and found["native"] >= 2
        assert found["held"] == (True, 0)
