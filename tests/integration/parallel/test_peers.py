"""open_peers where there is nothing to open: every rank hears why, before anything is allocated."""

import pytest
import torch
import torch.distributed as dist

from hf_paged.integration.parallel.peers import (
    PeersUnavailable,
    _obstacle_between,
    _obstacle_of_counts,
    open_peers,
)


@pytest.fixture
def two_ranks(monkeypatch):
    """Rank 1 of two whose rank 0 says `others[0]` at every exchange, or the same where that is missing."""
    others = []

    def gather(out, thing, group):
        out[:] = [others.pop(0) if others else thing, thing]

    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return others


@pytest.mark.usefixtures("two_ranks")
def test_a_cpu_has_no_peers():
    with pytest.raises(PeersUnavailable, match="rank 0: expected an NVIDIA GPU, got cpu"):
        open_peers(None, torch.device("cpu"))


def test_one_ranks_reason_is_everybodys(two_ranks, monkeypatch):
    monkeypatch.setattr("hf_paged.integration.parallel.peers._obstacle", lambda device, size: None)
    two_ranks.append("cannot reach the memory of all of [1]")
    with pytest.raises(PeersUnavailable, match="rank 0: cannot reach"):
        open_peers(None, torch.device("cpu"))


@pytest.mark.parametrize("capacity", [0, -16, 100])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match=f"multiple of 16, got {capacity}"):
        open_peers(None, torch.device("cpu"), capacity)


def test_ranks_have_to_be_on_one_host_with_a_gpu_each():
    assert _obstacle_between([("a", "0"), ("a", "1")]) is None
    assert "one host" in _obstacle_between([("a", "0"), ("b", "0")])
    assert "share a GPU" in _obstacle_between([("a", "0"), ("a", "0")])


def test_a_process_that_exchanged_before_meets_no_fresh_one():
    """torch would wait for ever: it numbers the messages of an exchange by process."""
    assert _obstacle_of_counts([2, 2]) is None
    assert "exchanged memory [1, 0] times" in _obstacle_of_counts([1, 0])
