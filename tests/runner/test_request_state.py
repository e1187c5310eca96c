"""RequestState: what a slot holds after admission, and when memory that graphs read has moved."""

from __future__ import annotations

import dataclasses

import torch

from hf_paged.runner.request_state import FIRST_TOKEN_CAPACITY, RequestState, SlotParameters

SETTINGS = SlotParameters(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**60 + 1, min_length=9,
                          eos_token_ids=(4,), max_length=100)  # fmt: skip


def admit(state, slot, **changes):
    state.admit([slot], [[1, 2, 3]], [[5]], [dataclasses.replace(SETTINGS, **changes)])


def test_parameters_of_a_slot():
    state = RequestState(3, 5000, 16, torch.device("cpu"))
    admit(state, 2)
    admit(state, 0, do_sample=False)
    floats = torch.tensor([0.7, 1.0 - 0.9, 0.1])
    assert torch.equal(state.sampling.floats[2], floats)
    assert torch.equal(state.sampling.floats[0], torch.tensor([0.0, *floats[1:]]))  # greedy is temperature 0
    assert state.sampling.ints[2].tolist() == [2**60 + 1, 5, 9]
    assert state.sampling.eos.tolist() == [[4], [-1], [4], [-1]]
    assert state.tokens[2, :4].tolist() == [1, 2, 3, 0]


def test_graphs_learn_of_moved_memory():
    """Longer sequences and more EOS ids move what a captured step points to; nothing else does."""
    state = RequestState(3, 5000, 16, torch.device("cpu"))
    admit(state, 0)
    held, version = state.sampling.eos.data_ptr(), state.version
    admit(state, 1, eos_token_ids=(7,))
    assert (state.sampling.eos.data_ptr(), state.version) == (held, version)
    admit(state, 1, eos_token_ids=(7, 8, 9))
    assert state.version == version + 1
    assert state.sampling.eos.tolist() == [[4, -1, -1], [7, 8, 9], [-1, -1, -1], [-1, -1, -1]]
    admit(state, 0, eos_token_ids=())
    assert state.sampling.eos[0].tolist() == [-1, -1, -1]
    admit(state, 0, max_length=FIRST_TOKEN_CAPACITY + 1)
    assert state.version == version + 2
