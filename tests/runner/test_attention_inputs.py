"""How a step is planned: row by row, or in groups that read their shared prefix once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_paged.attention import plan_prompts
from hf_paged.attention.plan_decode import GroupedPlan
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.kernels.attention.types import GroupedWork
from hf_paged.models import KVSpec
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.scheduler.prefix_tree import PrefixGroups


class Watched(TritonBackend):
    """Counts how often groups are looked at."""

    def __init__(self):
        self.looked = 0

    def choose_groups(self, *arguments):
        self.looked += 1
        return super().choose_groups(*arguments)


@pytest.fixture
def attention():
    spec = KVSpec(2, 8, 2, 64, torch.float16, torch.float16, torch.device("cpu"))
    return AttentionInputs(Watched(), spec, SimpleNamespace(block_size=16), max_model_len=4096)


def shared(rows, length):
    numbers = np.array([[0], [rows], [0], [length]], np.int32)
    return PrefixGroups(np.arange(rows, dtype=np.int32), *numbers)


def test_a_step_is_grouped_where_that_saves_enough(attention):
    lengths, slots = np.array([2100] * 6), np.arange(6)
    assert isinstance(attention.split_plan(lengths, slots, shared(4, 2048)), GroupedPlan)
    assert attention.saved_positions == 3 * 2048
    plain = attention.split_plan(lengths, slots)
    assert np.array_equal(attention.split_plan(lengths, slots, shared(2, 16)), plain)
    assert attention.saved_positions == 0
    longer = attention.split_plan(lengths + 9000, slots, shared(4, 2048))
    assert np.array_equal(longer, attention.split_plan(lengths + 9000, slots)), "most of what is read is a row's own"
    assert attention.saved_positions == 0


def test_windows_that_rows_have_outgrown_save_nothing(attention):
    lengths, slots, groups = np.array([2100] * 6), np.arange(6), shared(6, 2048)
    for windows, grouped in (((None, None), True), ((4096, 4096), True), ((2099, 2099), False), ((None, 512), True),
                             ((None, *[512] * 60), False)):
        attention.use_windows(windows)
        assert isinstance(attention.split_plan(lengths, slots, groups), GroupedPlan) == grouped, windows


def test_groups_are_looked_at_anew_where_groups_change_or_the_number_of_rows(attention):
    first, second = shared(4, 2048), shared(4, 1536)
    ends = []
    for groups, rows in ((first, 4), (first, 4), (first, 5), (second, 5), (second, 5)):
        plan = attention.split_plan(np.full(rows, 2100), np.arange(rows), groups)
        assert len(plan.rows) == rows
        ends.append(int(plan.items[0, 4]))
    assert ends == [2048, 2048, 2048, 1536, 1536]
    assert attention.backend.looked == 3
    attention.split_plan(np.full(5, 3000), np.arange(5))
    assert attention.backend.looked == 3, "a step without groups is none of its business"


def prompts_behind(shared_tokens, new, decodes=0):
    """A step of rows of as many new tokens behind what they share, and decode rows in front."""
    count = decodes + len(new)
    return SimpleNamespace(
        num_decode_rows=decodes, slots=np.arange(count), start=np.full(count, shared_tokens),
        num_new_tokens=np.array([1] * decodes + new), prompt_groups=shared(len(new), shared_tokens), groups=None,
    )


def test_prompts_are_grouped_where_that_saves_enough(attention):
    few = prompts_behind(2048, [8] * 200, decodes=3)
    found = attention.prompt_plan(few, 8, 2056)
    assert (found.own_begin == 2048).all() and len(found.own_begin) == 200
    assert attention.saved_prompt_positions == found.saved_positions > 0
    assert attention.prompt_plan(prompts_behind(2048, [200] * 8), 200, 2248) is None, "rows fill their tiles"
    assert attention.saved_prompt_positions == 0
    attention.prompt_plan(few, 8, 2056)
    attention.use_windows((1024, 1024))
    assert attention.prompt_plan(few, 8, 2056) is None, "most of it is out of sight"
    assert attention.saved_prompt_positions == 0


def test_a_captured_step_is_compared_with_the_tiles_of_its_graph(attention, monkeypatch):
    """Which are full ones, whatever the rows: more to gain."""
    monkeypatch.setattr(plan_prompts, "MOST_ELSEWHERE", 0.8)
    step = prompts_behind(4000, [12] * 60)
    assert attention.prompt_plan(step, 12, 4012) is None
    assert attention.captured_prompt_plan(step, 768) is not None


def test_prompts_without_groups_are_none_of_the_backends_business(attention, monkeypatch):
    monkeypatch.setattr(Watched, "plan_prompts", None)
    step = prompts_behind(2048, [8] * 200)
    step.prompt_groups = None
    assert attention.prompt_plan(step, 8, 2056) is attention.captured_prompt_plan(step, 2048) is None


def test_prompts_of_one_token_each_are_planned_as_rows_that_decode(attention):
    """An eager step of prompts that are all in the cache, beside rows that decode and share nothing."""
    step = prompts_behind(2048, [1] * 40, decodes=2)
    attention._work(np.full(2, 2049), step.slots[:2], None)
    work = attention._prompt_work(step, np.full(40, 2049), 1, 2049)
    assert isinstance(work, GroupedWork)
    assert (attention.saved_positions, attention.saved_prompt_positions > 0) == (0, True)
