"""Fixtures of several files of tests of the runner."""

from __future__ import annotations

import pytest
from planned_torch import PlannedTorch
from support import tiny_model

import hf_paged
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.padded_steps import PaddedSteps


@pytest.fixture
def steps():
    """Of a runner that never ran."""
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50, max_num_seqs=8) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        runner = generator.engine._core.pool.runner
        attention = AttentionInputs(PlannedTorch(), runner.spec, runner.state, runner.max_model_len)
        yield PaddedSteps(runner.executor, runner.cache, runner.state, attention, 256)
