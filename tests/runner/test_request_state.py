"""RequestState: what a slot holds after admission, and when memory that graphs read has moved."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import suppress

import numpy as np
import pytest
import torch
from support import Interrupt, interrupted_behind

from hf_paged.runner import request_state
from hf_paged.runner.request_state import FIRST_TOKEN_CAPACITY, RequestState, SlotParameters
from hf_paged.sampling.edit_reference import Edits

SETTINGS = SlotParameters(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**60 + 1, min_length=9,
                          eos_token_ids=(4,), max_length=100)


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


GROWTHS = {
    "slots": lambda state: state.grow(7),
    "tokens": lambda state: admit(state, 0, max_length=FIRST_TOKEN_CAPACITY + 1),
    "eos": lambda state: admit(state, 0, eos_token_ids=(7, 8, 9)),
    "edits": lambda state: admit(state, 0, edits=Edits(bad_words_ids=((4, 5), (6,)))),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_graphs_learn_of_memory_that_moved_before_an_interrupt(name):
    """Wherever it came: else they would go on to read what nobody writes any more."""
    files = "request_state.py", "edits.py", "edit_lines.py", "adapter_slots.py"

    def memory(state):
        lists = (lines.table for lines in state.edits._lists.values())
        tensors = [state.tokens, state.block_table, *state.sampling, state.edits._floats, state.edits._ints,
                   state.edits._factors, *lists, state.adapters._index]
        return tensors, [tensor.data_ptr() for tensor in tensors], (state.version, state.edits.generation)

    moved = 0
    for at in itertools.count(1):
        state = RequestState(3, 5000, 16, torch.device("cpu"))
        admit(state, 1)
        held, addresses, version = memory(state)
        with suppress(Interrupt), interrupted_behind(at, *files) as places:
            GROWTHS[name](state)
        _, after, known = memory(state)
        moved += after != addresses
        assert after == addresses or known != version, places[-1]
        GROWTHS[name](state)
        state.grow(8)
        assert {tensor.shape[-1] for tensor in memory(state)[0] if tensor.dim() == 1} == {9} and held
        assert {len(tensor) for tensor in memory(state)[0][:5]} == {len(state.adapters._is_named)} == {9}
        if len(places) < at:
            break
    assert moved > 1


def test_ever_new_mixes_of_edits_end_as_one_set_of_stages():
    """Graphs are kept per set of stages: their number has a bound."""
    state = RequestState(4, 5000, 16, torch.device("cpu"))
    options = [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": (3,)},
               {"bad_words_ids": ((4,),)}]
    seen = set()
    for mix in itertools.product((False, True), repeat=len(options)):
        for slot, (chosen, option) in enumerate(zip(mix, options, strict=True)):
            admit(state, slot, edits=Edits(**option) if chosen else Edits())
        stages = state.stages(np.arange(4))
        assert stages >= frozenset().union(*(Edits(**o).features() for c, o in zip(mix, options, strict=True) if c))
        assert bool(stages) == any(mix)
        seen.add(stages)
    assert len(seen) <= 10
    assert state.stages(np.array([0])) <= frozenset().union(*(Edits(**option).features() for option in options))


def test_more_slots_keep_what_slots_hold_and_graphs_learn_of_it():
    """Also the edits of their logits; the slot that only padding had is an ordinary one afterwards."""
    state = RequestState(3, 5000, 16, torch.device("cpu"))
    settings = [{"edits": Edits(repetition_penalty=1.5)}, {}, {"edits": Edits(bad_words_ids=((4,),))}]
    for slot, changes in enumerate(settings):
        admit(state, slot, seed=slot + 1, **changes)
    slots, places = torch.arange(3), torch.full((3,), 3, dtype=torch.int32)
    names = state.stages(np.arange(3))
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))

    def found():
        drawn = state.sample(logits.clone(), slots, places, names)  # which goes into the tokens, too
        return [drawn, *(t[:3].clone() for t in (state.tokens, state.block_table, *state.sampling))]

    before, version, generation = found(), state.version, state.edits.generation
    state.grow(7)
    assert state.num_slots == state.padding_slot == 7
    assert state.version > version and state.edits.generation > generation
    for kept, old in zip(found(), before, strict=True):
        assert torch.equal(kept, old)
    assert state.stages(np.arange(3)) == names
    assert (state.sampling.eos[3:] == -1).all()
    for slot in (3, 6):
        admit(state, slot, seed=slot - 2, edits=Edits(bad_words_ids=((4,),)))
    assert state.sampling.ints[6].tolist() == [4, 5, 9]
    assert not state.block_table[7].any() and not state.sampling.floats[7].any()
    beyond = logits[[2, 2]].clone()
    beyond[:, 4] = 100.0
    tokens = state.sample(beyond, torch.tensor([3, 6]), places[:2], state.stages(np.array([3, 6])))
    assert 4 not in tokens.tolist()


@pytest.mark.parametrize("lengths", [[3], [5, 9, 2], [100_000, 7, 3, 300, 250, 1], [40_000] * 3 + [20] * 60])
def test_rows_of_any_lengths_are_sent_as_they_are(lengths, monkeypatch):
    """What goes to the device is at most twice what they hold, where that is not little anyway."""
    sent, own = [], request_state.upload

    def upload(array, device):
        sent.append(array.nbytes)
        return own(array, device)

    monkeypatch.setattr(request_state, "upload", upload)
    state = RequestState(len(lengths), 1 << 17, 16, torch.device("cpu"))
    tokens = [np.random.default_rng(i).integers(1, 9999, n, np.int32) for i, n in enumerate(lengths)]
    tables = [list(range(i + 1, i + 2 + n // 16)) for i, n in enumerate(lengths)]
    settings = [dataclasses.replace(SETTINGS, max_length=n + 5) for n in lengths]
    slots = list(reversed(range(len(lengths))))
    state.admit(slots, tokens, tables, settings)
    for slot, row, table in zip(slots, tokens, tables, strict=True):
        assert state.tokens[slot, : len(row)].tolist() == row.tolist()
        assert state.block_table[slot, : len(table)].tolist() == table
    assert sum(sent) < 2 * 4 * (sum(lengths) + sum(map(len, tables))) + (9 << 20)
