"""How evenly tiles of prompts are dealt: counted item by item as the kernel does it, and when a queue is asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import make_case

from hf_paged.attention import hopper_backend, triton_backend
from hf_paged.attention.hopper_backend import HopperBackend, imbalance
from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention.types import AttentionSpec, TileQueue
from hf_paged.models import KVSpec
from hf_paged.runner.attention_inputs import AttentionInputs

LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=6)
UNEVEN = [(256, 2112), *[(2112, 2112)] * 3, (1600, 1600)]


def shares(lengths, tokens, bundles, programs):
    """What each program gets, and the longest item, as `kernels/hopper/prefill.py` finds rows, item by item."""
    starts = np.cumsum([0, *(new for new, _ in lengths)])
    load, longest = [0.0] * programs, 0.0
    for item in range((starts[-1] // tokens + len(lengths)) * bundles):
        turn, program = divmod(item, programs)
        tile = item // bundles
        row = max(r for r in range(len(lengths)) if starts[r] // tokens + r <= tile)
        new, before_row = lengths[row]
        before = (-(-new // tokens) - 1 - (tile - (starts[row] // tokens + row))) * tokens
        if before >= 0:
            cost = -(-(before_row + min(before + tokens, new)) // 128) + 1
            load[program if turn % 2 == 0 else programs - 1 - program] += cost
            longest = max(longest, cost)
    return load, longest


@given(LENGTHS, st.sampled_from([8, 64]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 5, 132]))
def test_it_counts_what_each_program_gets(lengths, tokens, bundles, programs):
    num_new, before = np.array(lengths).T
    load, longest = shares(lengths, tokens, bundles, programs)
    expected = max(load) / max(sum(load) / programs, longest)
    assert imbalance(num_new, num_new + before, tokens, bundles, programs) == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "wanted"), [
    (UNEVEN, True), ([(4096, 4096)] * 2, True), ([(1024, 1024)] * 16, True), ([(2112, 2112)] * 4, False),
    ([(576, 576)] * 28, False), ([(8192, 38192)], False), ([(500, 500)], False), ([(63, 9000), (20, 20)], False),
], ids=str)
def test_a_queue_is_asked_for_where_shares_are_uneven(monkeypatch, rows, wanted):
    monkeypatch.setattr(hopper_backend, "num_multiprocessors", lambda device: 132)
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cpu"), 16)
    num_new, seq_lens = np.array(rows).T
    assert BACKENDS["hopper"].wants_queue(num_new, seq_lens, spec) is wanted
    for name in ("torch", "triton", "flash_attn"):
        assert not BACKENDS[name].wants_queue(num_new, seq_lens, spec)
    assert not BACKENDS["hopper"].wants_queue(num_new, seq_lens, spec._replace(dtype=torch.float32))
    assert not HopperBackend(measured_only=True).wants_queue(num_new, seq_lens, spec._replace(head_dim=256))


def test_an_eager_step_brings_its_prompts_the_queue_that_they_want(monkeypatch):
    """Each step has counters of its own: two may be on their way. Decode rows beside them have none."""
    monkeypatch.setattr(hopper_backend, "num_multiprocessors", lambda device: 132)
    spec = KVSpec(2, 16, 8, 128, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    state = SimpleNamespace(block_table=torch.zeros(8, 4, dtype=torch.int32), block_size=16)
    attention = AttentionInputs(BACKENDS["hopper"], spec, state, 4096)
    monkeypatch.setattr(BACKENDS["hopper"], "plan", lambda *_: None)

    def step(rows):
        num_new, seq_lens = np.array([(1, 700), *rows]).T
        plan = SimpleNamespace(slots=np.arange(len(num_new)), num_decode_rows=1, start=seq_lens - num_new,
                               num_new_tokens=num_new, groups=None, prompt_groups=None)
        starts = np.concatenate([[0], np.cumsum(num_new)])
        parts, _ = attention.parts(plan, starts, torch.zeros(starts[-1], dtype=torch.int64), ends=False)
        return [meta.work for _, _, meta in parts]

    (no_queue, first), (_, second), (_, even) = step(UNEVEN), step(UNEVEN), step([(2112, 2112)] * 4)
    assert no_queue is None and even is None
    for queue in (first, second):
        assert isinstance(queue, TileQueue)
        assert queue.counters.dtype == torch.int32 and queue.counters.tolist() == [0, 0]
    assert first.counters.data_ptr() != second.counters.data_ptr()
    attention.use_windows((None, None))
    assert isinstance(step(UNEVEN)[1], TileQueue)
    attention.use_windows((None, 512))
    assert step(UNEVEN)[1] is None, "tiles of layers with a window see otherwise"


@pytest.mark.parametrize("other", [{}, {"chunk": 64}, {"value_dim": 64}], ids=str)
def test_chunks_and_values_of_another_size_than_keys_go_to_triton(monkeypatch, other):
    taken = []
    monkeypatch.setattr(hopper_backend, "_hopper_kernel", lambda: lambda *_, **__: taken.append("hopper"))
    monkeypatch.setattr(triton_backend, "paged_attention_prefill", lambda *_, **__: taken.append("triton"))
    case = make_case([(200, 300)], seed=0, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, **other)
    HopperBackend(measured_only=True).run(*case[:5])
    assert taken == ["triton" if other else "hopper"]


@pytest.mark.parametrize("changes", [{"are_calls_alike": False}, {"has_value_dim": True}], ids=str)
def test_no_queue_is_made_for_calls_of_unlike_sizes(monkeypatch, changes):
    monkeypatch.setattr(hopper_backend, "num_multiprocessors", lambda device: 132)
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cpu"), 16)
    num_new, seq_lens = np.array(UNEVEN).T
    assert BACKENDS["hopper"].wants_queue(num_new, seq_lens, spec)
    assert not BACKENDS["hopper"].wants_queue(num_new, seq_lens, spec._replace(**changes))
