"""The table of running sequences: its tokens stay where they belong while it grows, and take no memory beyond them."""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.scheduler.sequence import RunningTable, Sequence


def resident_bytes(array: np.ndarray) -> int:
    """Of the array's pages alone: other threads of this process allocate as they like."""
    page = os.sysconf("SC_PAGE_SIZE")
    begin = array.ctypes.data // page * page
    is_resident = (ctypes.c_ubyte * -(-(array.ctypes.data + array.nbytes - begin) // page))()
    length = ctypes.c_size_t(len(is_resident) * page)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), length, is_resident) == 0
    return page * sum(flags & 1 for flags in is_resident)


def settle(table, name, length, limit):
    seq = Sequence(name, [(len(name) * 31 + i) % 1000 for i in range(length)], max_new_tokens=limit - length)
    table.settle(seq, 0, length, limit)
    return seq


@given(lengths=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=12), data=st.data())
def test_tokens_are_those_of_the_tenants_whatever_comes_and_goes(lengths, data):
    table, tenants = RunningTable(2), []
    for i, (length, more) in enumerate(lengths):
        if not table.num_free_slots:
            table.grow(table.num_slots + 1)
        tenants.append(settle(table, "x" * i, length, length + more))
        seq = tenants[-1]
        if more:  # the last place that it may have
            table.tokens[seq.slot, length + more - 1] = 5
        if len(tenants) > 1 and data.draw(st.booleans()):
            gone = tenants.pop(data.draw(st.integers(0, len(tenants) - 2)))
            slot = gone.slot
            gone.detach(0)
            table.vacate(slot)
        for tenant in tenants:
            assert tenant.token_ids == tenant.prompt_token_ids
            assert table.read_tokens(tenant.slot, 0) == tenant.prompt_token_ids


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident pages")
def test_one_long_sequence_takes_memory_for_its_own_tokens_alone():
    """Of 256 slots with 128k tokens each; also where the table has to grow for it, twice."""
    table = RunningTable(256)
    for count, length in enumerate((300, 1 << 16, (1 << 17) + 50)):
        settle(table, "y" * count, length, length + 200)
    assert table.tokens.nbytes > 1 << 27
    assert (2 << 16) * 4 < resident_bytes(table.tokens) < 1 << 25
