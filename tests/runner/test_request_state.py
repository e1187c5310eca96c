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
from hf_paged.runner.request_state import RequestState
from hf_paged.sampling import edit_lines
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.table import Drawing

SAMPLED = Drawing(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
SETTINGS = {"seed": 2**60 + 1, "min_length": 9, "eos_token_ids": (4,), "max_length": 100}


def slot_row(drawing=SAMPLED, **changes):
    return SlotRow.of(drawing, **SETTINGS | changes)


def admit(state, slot, drawing=SAMPLED, **changes):
    state.admit([slot], [[1, 2, 3]], [[5]], [slot_row(drawing, **changes)])


def test_parameters_of_a_slot():
    state = RequestState(3, 5000, 16, torch.device("cpu"))
    admit(state, 2)
    admit(state, 0, dataclasses.replace(SAMPLED, do_sample=False))
    floats = torch.tensor([0.7, 1.0 - 0.9, 0.1])
    assert torch.equal(state.sampling.floats[2], floats)
    assert torch.equal(state.sampling.floats[0], torch.tensor([0.0, *floats[1:]]))  # greedy is temperature 0
    assert state.sampling.ints[2].tolist() == [2**60 + 1, 5, 9]
    assert state.sampling.eos[:, 0].tolist() == [4, -1, 4, -1] and (state.sampling.eos[:, 1:] == -1).all()
    assert state.tokens[2, :4].tolist() == [1, 2, 3, 0]


def addresses(state):
    lists = (lines.table for lines in state.edits._lists.values())
    return [t.data_ptr() for t in (state.tokens, state.block_table, *state.sampling, *lists)]


@pytest.fixture
def small_tables(monkeypatch):
    """Tables that begin as small as they can."""
    monkeypatch.setattr(request_state, "_HISTORY_BYTES", 16 * 4 * 4)
    monkeypatch.setattr(request_state, "_FIRST_STOP_TOKENS", 1)
    monkeypatch.setattr(edit_lines, "_FIRST_LINES", 1)
    monkeypatch.setattr(edit_lines, "_FIRST_WIDTH", 1)


def test_no_ordinary_request_moves_a_table():
    """The longest sequence, eight stop tokens, 300 biases, the edits of 60 requests."""
    state = RequestState(64, 40_960, 16, torch.device("cpu"))
    admit(state, 0)
    held = addresses(state)
    admit(state, 1, max_length=40_960, eos_token_ids=range(8))
    admit(state, 2, edits=Edits(suppress_tokens=tuple(range(500)), bad_words_ids=((4, 5), (6,))))
    for slot in range(60):
        admit(state, slot, edits=Edits(sequence_bias=tuple(((i,), float(slot)) for i in range(70))))
    assert addresses(state) == held and not any(state.moves.values()) and not state.edits.generation


def test_more_slots_take_no_more_history_than_a_first_table_may(monkeypatch):
    """A lockstep call of 1,024 rows would else take 4 GiB where eight slots held sequences of a million tokens."""
    monkeypatch.setattr(request_state, "_HISTORY_BYTES", 4 * 9 * 4096)
    state = RequestState(8, 1 << 20, 16, torch.device("cpu"))
    assert state.tokens.shape == (9, 4096)
    state.admit([2], [[7, 8]], [[5]], [slot_row(max_length=100)])
    state.grow(63)
    assert state.tokens.shape == (64, 576) and state.tokens[2, :2].tolist() == [7, 8]
    state.admit([2], [[7, 8]], [[5]], [slot_row(max_length=3000)])
    state.grow(127)
    assert state.tokens.shape[1] >= 3000 and state.tokens[2, :2].tolist() == [7, 8]


@pytest.mark.parametrize("max_model_len", [1, 250, 5000, 40_960, 1 << 20])
def test_rows_of_tables_are_aligned(max_model_len):
    """Kernels are compiled for the alignment of a table's rows: for another length they would be compiled again."""
    state = RequestState(256, max_model_len, 16, torch.device("meta"))
    assert state.tokens.stride(0) % 16 == state.block_table.stride(0) % 16 == 0
    assert state.tokens.shape[1] >= min(max_model_len, 1 << 18) - (1 << 10) and state.tokens.nbytes <= 257 << 20
    assert state.block_table.shape[1] * 16 >= max_model_len


def test_graphs_learn_of_moved_memory(small_tables):
    """Longer sequences and more stop tokens move what a captured step points to; nothing else does."""
    state = RequestState(3, 5000, 16, torch.device("cpu"))
    admit(state, 0, max_length=16)
    held = addresses(state)
    admit(state, 1, max_length=16, eos_token_ids=(7,))
    assert addresses(state) == held and not any(state.moves.values())
    admit(state, 1, max_length=16, eos_token_ids=(7, 8, 9))
    assert state.moves == {"slots": 0, "token history": 0, "stop tokens": 1}
    assert state.sampling.eos.tolist() == [[4, -1, -1], [7, 8, 9], [-1, -1, -1], [-1, -1, -1]]
    admit(state, 0, max_length=16, eos_token_ids=())
    assert state.sampling.eos[0].tolist() == [-1, -1, -1]
    admit(state, 0, max_length=17)
    assert state.moves == {"slots": 0, "token history": 1, "stop tokens": 1} and state.tokens.shape[1] == 32


GROWTHS = {
    "slots": lambda state: state.grow(7),
    "tokens": lambda state: admit(state, 0, max_length=5000),
    "eos": lambda state: admit(state, 0, eos_token_ids=(7, 8, 9)),
    "edits": lambda state: admit(state, 0, edits=Edits(bad_words_ids=((4, 5), (6,)))),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_graphs_learn_of_memory_that_moved_before_an_interrupt(small_tables, name):
    """Wherever it came: else they would go on to read what nobody writes any more."""
    files = "request_state.py", "edits.py", "edit_lines.py"

    def memory(state):
        """Tensors that every graph may read and those of edits, which only some do; what each is known by."""
        edits, lists = state.edits, (lines.table for lines in state.edits._lists.values())
        every = [state.tokens, state.block_table, *state.sampling, state.adapters._index]
        edited = [edits._floats, edits._ints, edits._factors, *lists]
        return (every, edited), ({**state.moves}, ({**state.moves}, edits.generation))

    def addresses(tensors):
        return [tensor.data_ptr() for tensor in tensors]

    moved = 0
    for at in itertools.count(1):
        state = RequestState(3, 5000, 16, torch.device("cpu"))
        admit(state, 1)
        held, before = memory(state)
        with suppress(Interrupt), interrupted_behind(at, *files) as places:
            GROWTHS[name](state)
        for old, new, known, knows in zip(held, *memory(state)[:1], before, memory(state)[1], strict=True):
            moved += addresses(old) != addresses(new)
            assert addresses(old) == addresses(new) or known != knows, places[-1]
        GROWTHS[name](state)
        state.grow(8)
        every, edited = memory(state)[0]
        assert {tensor.shape[-1] for tensor in [*every, *edited] if tensor.dim() == 1} == {9}
        assert {len(tensor) for tensor in every} == {len(state.adapters._is_named)} == {9}
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

    before, generation = found(), state.edits.generation
    state.grow(7)
    assert state.num_slots == state.padding_slot == 7
    assert state.moves["slots"] == 1 and state.edits.generation > generation
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
    settings = [slot_row(max_length=n + 5) for n in lengths]
    slots = list(reversed(range(len(lengths))))
    state.admit(slots, tokens, tables, settings)
    for slot, row, table in zip(slots, tokens, tables, strict=True):
        assert state.tokens[slot, : len(row)].tolist() == row.tolist()
        assert state.block_table[slot, : len(table)].tolist() == table
    assert sum(sent) < 2 * 4 * (sum(lengths) + sum(map(len, tables))) + (9 << 20)
