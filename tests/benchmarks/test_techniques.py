"""Each technique that the benchmark switches off is one that the package has, and off while its engine lives."""

from __future__ import annotations

import bench_engines
import pytest
import techniques
import torch
from workloads import make_workload

import hf_paged
from hf_paged.attention.hopper_backend import HopperBackend
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.engine import engine_registry
from hf_paged.models import fused
from hf_paged.runner.padded_steps import PaddedSteps

FOUND = techniques.switches()
REPLACED = [name for name, overrides in FOUND.items() if techniques.WITHOUT in overrides]


def test_switches_of_the_config_change_it_and_have_the_names_of_its_fields():
    of_config = {name: overrides for name, overrides in FOUND.items() if name not in REPLACED}
    assert {"enforce_eager", "overlap", "enable_prefix_caching", "attention_backend"} <= set(of_config)
    for overrides in of_config.values():
        assert hf_paged.PagedConfig(**overrides) != hf_paged.PagedConfig()
    assert {name for overrides in of_config.values() for name in overrides} == set(of_config) - {"hopper"}


def test_what_has_no_field_is_off_inside_of_its_context_alone():
    """As the package asks: the backends in use for their plan of prompts, an executor whether parts may come."""
    own = TritonBackend.plan_prompts
    assert HopperBackend.plan_prompts is own and fused.makes_parts(torch.device("cuda"))
    with techniques.replaced("prompt_groups"):
        assert HopperBackend().plan_prompts(*[None] * 4) is None and TritonBackend.plan_prompts is not own
    with techniques.replaced("joined_norms"):
        assert not fused.makes_parts(torch.device("cuda"))
    with techniques.replaced("frozen_heap"):
        assert engine_registry.is_left_to_program()
    before = _replaceable()
    with techniques.replaced("mixed_steps"):
        assert PaddedSteps.mixed_size(None, 64, 8192) == 0
    with techniques.replaced("tile_queue"):
        assert HopperBackend(measured_only=True).wants_queue(*[None] * 3) is False
    with techniques.replaced("narrow_layer"):
        assert fused.narrow_layer(28) == 28
    assert _replaceable() == before and fused.narrow_layer(28) == 27
    assert TritonBackend.plan_prompts is own and fused.makes_parts(torch.device("cuda"))
    assert set(REPLACED) == {"prompt_groups", "joined_norms", "frozen_heap", "mixed_steps", "tile_queue",
                             "narrow_layer"}


def _replaceable():
    return (TritonBackend.plan_prompts, fused.makes_parts, engine_registry.is_left_to_program, PaddedSteps.mixed_size,
            HopperBackend.wants_queue, fused.narrow_layer)


@pytest.mark.parametrize("name", REPLACED)
def test_an_engine_runs_without_it_until_the_next_row(name):
    workload, engine = make_workload("batch 2", 0.02), bench_engines.Ours("tiny", "cpu")
    before = _replaceable()
    try:
        engine.open(workload, FOUND[name])
        assert _replaceable() != before
        assert engine.run(workload) == workload.output_lengths
        engine.open(workload, {})
        assert _replaceable() == before
    finally:
        engine.close()
