"""What graphs of padded sizes are given: sizes that waste little, and a plan of attention for rows and padding."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planned_torch import PlannedTorch
from support import tiny_model

import hf_paged
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.padded_steps import PaddedSteps, decode_sizes, far_apart, mixed_sizes, prompt_sizes


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1024])
def test_decode_sizes_pad_little_and_end_with_the_most(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(9, most + 1):
        padded = sizes[np.searchsorted(sizes, count)]
        assert padded - count < max(8, 0.13 * padded), count


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


@pytest.fixture
def steps():
    """Of a runner that never ran."""
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50, max_num_seqs=8) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        runner = generator.engine._core.pool.runner
        attention = AttentionInputs(PlannedTorch(), runner.spec, runner.state, runner.max_model_len)
        yield PaddedSteps(runner.executor, runner.cache, runner.state, attention, 256)


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


def test_sizes_far_apart():
    assert [far_apart(range(n)) for n in range(6)] == [[], [0], [0, 1], [0, 2, 1], [0, 3, 1, 2], [0, 4, 2, 1, 3]]
    for n in range(200):
        found = far_apart(range(n))
        assert sorted(found) == list(range(n))
        # After 2 ** k + 1 of them no more than n / 2 ** k that follow each other are left.
        for k in range(n.bit_length()):
            taken = sorted(found[: 2**k + 1])
            assert all(b - a <= -(-n // 2**k) for a, b in pairwise(taken))


def test_decode_rows_that_come_are_far_apart_and_no_more_than_wanted(steps):
    rows = [run.args[0] for run in steps.coming(8, 64) if run.func.__name__ == "_run_padding_rows"]
    assert rows == [1, 8, 2, 4] and steps.decode_sizes.tolist()[:4] == [1, 2, 4, 8]
    assert [run.args[0] for run in steps.coming(3)] == [1, 2]


@pytest.mark.parametrize("may_queue", [False, True])
def test_what_comes_begins_with_a_row_and_has_every_kernel_of_prompts(steps, monkeypatch, may_queue):
    """The one that takes tiles from a queue is another than the one that is dealt them."""
    monkeypatch.setattr(steps._attention.backend, "has_queue", may_queue)
    coming = list(steps.coming(8, 64))
    found = [(run.func.__name__, *run.args, run.keywords.get("queued")) for run in coming]
    prompts = [("_run_padding_tokens", 16, False), ("_run_padding_tokens", 16, True)][: 1 + may_queue]
    assert found[: len(prompts) + 1] == [("_run_padding_rows", 1, None), *prompts]
    assert [of for of in found if of[-1]] == prompts[1:]
    with torch.no_grad():
        for run in coming:
            run()
    steps._attention.use_windows((None, 8))
    assert not any(run.keywords.get("queued") for run in steps.coming(8, 64))
