"""On a GPU, with graphs and overlap: tokens after an update are stock's, and another thread's stream is waited for."""

from __future__ import annotations

import threading

import pytest
import torch
from support import random_prompts, tiny_model
from transformers import GenerationConfig
from updated_weights import ORACLES

import hf_paged
from hf_paged import PagedGenerator

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128}
PROMPT = random_prompts([37])[0]


def on_gpu():
    return tiny_model(**SHAPE).to("cuda")


def in_place(model):
    model.model.layers[0].self_attn.v_proj.weight.data.neg_()


def replace_a_parameter(model):
    """Graphs hold the old one."""
    weight = model.model.layers[0].self_attn.v_proj.weight
    model.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(-weight.detach())


@pytest.mark.parametrize("change", [in_place, replace_a_parameter])
@pytest.mark.parametrize("mode", ORACLES)
def test_tokens_after_an_update(mode, change):
    model = hf_paged.enable(on_gpu(), strict=True, on_weight_change=mode)
    engine = hf_paged.get_engine(model)
    request_id, cuts, completion = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=40)), [], None
    for steps in (9, 9, 1000):
        while engine.has_unfinished() and steps:
            steps -= 1
            for output in engine.step():
                completion = output.completion or completion
        if engine.has_unfinished():
            with engine.weight_update():
                cuts.append(engine._core.requests[request_id].sequence.num_output_tokens)
                change(model)
    assert len(cuts) == 2
    assert completion.token_ids == ORACLES[mode](on_gpu(), PROMPT, 40, dict.fromkeys(cuts, change))
    assert [completion.weight_versions.count(version) for version in range(3)] == [
        cuts[0], cuts[1] - cuts[0], 40 - cuts[1]]


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_thread_writes_on_a_stream_of_its_own(mode):
    """Weights are NaN for a while behind a long kernel; no step may see them, in either direction."""
    with PagedGenerator(on_gpu(), on_weight_change=mode) as generator:
        engine, weight = generator.engine, generator.model.model.layers[0].self_attn.v_proj.weight
        right, stop = weight.detach().clone(), threading.Event()
        errors = []

        def train():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    while not stop.is_set():
                        with engine.weight_update():
                            torch.cuda._sleep(2_000_000)
                            weight.data.fill_(torch.nan)
                            torch.cuda._sleep(2_000_000)
                            weight.data.copy_(right)
            except Exception as error:
                errors.append(error)

        expected = generator.generate([PROMPT] * 4, max_new_tokens=60)
        thread = threading.Thread(target=train)
        thread.start()
        try:
            made = [generator.generate([PROMPT] * 4, max_new_tokens=60) for _ in range(3)]
        finally:
            stop.set()
            thread.join()
        assert not errors
        for completions in made:
            assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
        assert any(len(set(c.weight_versions)) > 1 for completions in made for c in completions)
