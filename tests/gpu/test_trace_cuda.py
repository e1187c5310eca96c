"""On a GPU a trace has a track of its time: a span for every replay and eager step, in order and within the run."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from support import random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True])
def test_spans_of_the_gpu(tmp_path, eager):
    path = tmp_path / "steps.json"
    model = tiny_model(head_dim=64, hidden_size=128, intermediate_size=128).to("cuda")
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None)
    with PagedGenerator(model, num_blocks=64, enforce_eager=eager) as generator:
        generator.generate(random_prompts([30, 20, 9]), config)
        before = generator.engine.stats().num_steps
        with hf_paged.trace(path):
            started = time.perf_counter()
            generator.generate(random_prompts([30, 20, 9], seed=5), config)
            seconds = time.perf_counter() - started
        num_steps = generator.engine.stats().num_steps - before
    events = json.loads(path.read_text())
    [track] = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "GPU"]
    spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
    names = {e["name"].rpartition(" ")[0] or e["name"] for e in spans}
    assert names == {"eager"} if eager else names == {"decode", "prompts"}
    assert len(spans) == num_steps
    for first, then in pairwise(spans):
        assert first["ts"] + first["dur"] <= then["ts"] + 1.0  # events have half a microsecond's resolution
    assert all(0 < e["dur"] < 1e5 for e in spans)
    assert spans[-1]["ts"] + spans[-1]["dur"] <= 1e6 * seconds + 5e3 and sum(e["dur"] for e in spans) < 1e6 * seconds
    waits = [e for e in events if e["ph"] == "X" and e["name"].startswith("step") and e["tid"] == 3]
    for span, wait in zip(spans, waits, strict=True):  # the host has the tokens when the device is done, and not before
        assert span["ts"] + span["dur"] <= wait["ts"] + wait["dur"] + 200


def test_nothing_is_recorded_without_a_trace():
    from hf_paged.runner import device_times

    model = tiny_model(head_dim=64, hidden_size=128, intermediate_size=128).to("cuda")
    with PagedGenerator(model, num_blocks=64) as generator:
        generator.generate(random_prompts([30]), GenerationConfig(max_new_tokens=4, do_sample=False))
        assert device_times.take() == ()
