"""What graphs of padded sizes are given: sizes that waste little, and a plan of attention for rows and padding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_calls import image_call, seeing_model
from planned_torch import PlannedTorch

import hf_paged
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import PaddedSteps, decode_sizes, mixed_sizes, prompt_sizes
from hf_paged.runner.step_shape import StepShape


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1024])
def test_decode_sizes_pad_little_and_end_with_the_most(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(9, most + 1):
        padded = sizes[np.searchsorted(sizes, count)]
        assert padded - count < max(8, 0.2 * padded), count


@pytest.mark.parametrize("most", [1, 8, 100, 256, 1024])
def test_few_sizes_hold_the_decode_rows_that_go_with_prompts(most):
    sizes = mixed_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert len(sizes) <= 2 * np.log2(max(most, 2))
    for count in range(1, most + 1):
        assert count <= sizes[np.searchsorted(sizes, count)] < max(9, 2 * count), count


def test_prompt_sizes_shrink_with_the_model():
    fine = [16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792]
    assert prompt_sizes(750_000_000, 8192) == [*fine, *range(2048, 8193, 1024)]
    assert prompt_sizes(8_000_000_000, 8192)[-1] == 1024
    assert prompt_sizes(70_000_000_000, 8192)[-1] == 128
    assert prompt_sizes(1_000, 100)[-1] == 64
    assert prompt_sizes(1_000, 4) == []


def test_the_attentions_plan_holds_every_rows_visible_tokens(steps):
    """The token that is being computed sees itself; padding sees nothing."""
    plan = SimpleNamespace(num_decode_rows=3, slots=np.array([4, 0, 7]), start=np.array([9, 300, 41]),
                           groups=None)
    (rows, items), tiles = steps.decode_inputs(plan, 4)
    assert tiles is None
    assert rows.tolist() == [[4, 0, 7, 8], [9, 300, 41, -1]]
    by_row = {row: (length, slot) for row, _, _, length, slot in items[items[:, 0] >= 0].tolist()}
    assert by_row == {0: (10, 4), 1: (301, 0), 2: (42, 7), 3: (0, 8)}


def test_prompts_get_a_graph_where_its_padding_is_worth_it(steps):
    assert [steps.prompt_size(1, n) for n in (0, 1, 16, 17, 257)] == [0, 16, 16, 32, None]
    assert steps.prompt_size(8, 8) == 16
    assert steps.prompt_size(9, 20) is None, "more rows than slots"
    steps._num_parameters = 20_000_000_000
    assert steps.prompt_size(1, 100) == 128
    assert steps.prompt_size(1, 130) is None, "126 padding tokens of 20B parameters are 5 TFLOP"


def test_decode_rows_behind_images_have_the_positions_of_their_axes(monkeypatch):
    """As graphs capture them, beside rows of text: the tokens are those of the eager step."""
    model, found = seeing_model("qwen2.5-vl"), []
    launch = ModelRunner.launch

    def both(self, plan, *args, **kwargs):
        handle = launch(self, plan, *args, **kwargs)
        if plan.num_decode_rows == len(plan.slots):
            attention = AttentionInputs(PlannedTorch(), self.spec, self.state, self.max_model_len)
            steps = PaddedSteps(self.executor, self.cache, self.state, attention, 256)
            arrays, _ = steps.decode_inputs(plan, 4)
            logits = steps.logits(StepShape("logits", rows=4), *map(torch.from_numpy, arrays))
            assert not self._fed.feeds(plan)
            found.append((logits[: len(plan.slots)].argmax(-1).tolist(), handle.tokens.tolist()))
        return handle

    monkeypatch.setattr(ModelRunner, "launch", both)
    hf_paged.enable(model, strict=True)
    call = image_call(model, [[5, "0", 6], [9], [3, "1", 4]])
    model.generate(**call, max_new_tokens=6)
    assert len(found) == 5 and all(padded == eager for padded, eager in found)
    axis_offsets = hf_paged.get_engine(model)._core.pool.runner.state.axis_offsets
    assert axis_offsets.moves == 1
    monkeypatch.setattr(type(axis_offsets), "fed", lambda *_: None)  # a control
    found.clear()
    model.generate(**call, max_new_tokens=6)
    assert not all(padded == eager for padded, eager in found)
