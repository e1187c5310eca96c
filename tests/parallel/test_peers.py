"""open_peers where there is nothing to open: every rank hears why, before anything is allocated."""

import os

import pytest
import torch
import torch.distributed as dist

from hf_paged.parallel import peers
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.peers import PeersUnavailable, _obstacle_between, open_peers


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
    monkeypatch.setattr("hf_paged.parallel.peers._obstacle", lambda device, size: None)
    two_ranks.append("cannot reach the memory of all of [1]")
    with pytest.raises(PeersUnavailable, match="rank 0: cannot reach"):
        open_peers(None, torch.device("cpu"))


@pytest.mark.parametrize(("wanted", "obstacle"), [("auto", None), ("peers", None), ("nccl", None), ("auto", "a wall")])
def test_dry_runs_before_ranks_meet_see_peers_where_there_will_be_some(wanted, obstacle, monkeypatch):
    """Of the same numbers of bytes, which kernels are compiled for."""
    own_zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **named: own_zeros(*size, **named))
    monkeypatch.setattr(peers, "_obstacle", lambda device, size: obstacle)
    asked = []
    monkeypatch.setattr(peers, "open_peers", lambda hosts, device, capacity: asked.append(capacity))
    group = ParallelGroup(1, 4)
    group._hosts = "hosts"
    with peers.rehearsed_peers(group, torch.device("cpu"), wanted, 1000):
        assert (group.peers is None) == (wanted == "nccl" or obstacle is not None)
        if group.peers is not None:
            assert (group.peers.size, group.peers.rank, group.peers.capacity) == (4, 1, 1008)
            assert all(buffer.data_ptr() % 16 == 0 for buffer in group.peers.buffers)
    assert group.peers is None
    peers.connect(group, torch.device("cuda"), wanted, 1000)
    assert asked == [1008] * (wanted != "nccl")
    with peers.rehearsed_peers(ParallelGroup(0, 1), torch.device("cpu"), wanted, 1000):
        pass


@pytest.mark.parametrize("capacity", [0, -16, 100])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match=f"multiple of 16, got {capacity}"):
        open_peers(None, torch.device("cpu"), capacity)


def test_ranks_have_to_be_on_one_host_with_a_gpu_each():
    assert _obstacle_between([("a", "0"), ("a", "1")]) is None
    assert "one host" in _obstacle_between([("a", "0"), ("b", "0")])
    assert "share a GPU" in _obstacle_between([("a", "0"), ("a", "0")])


@pytest.fixture
def exchanges(monkeypatch):
    """Those that are made in place of torch's, as (rank, size)."""
    made = []

    def exchange(memory, folder, rank, size):
        made.append((rank, size))
        peers._num_exchanges += 1

    monkeypatch.setattr(peers, "_exchange", exchange)
    monkeypatch.setattr(peers, "_symmetric_memory", lambda num_bytes, device: torch.empty(num_bytes))
    monkeypatch.setattr(peers, "_num_exchanges", 1)
    return made


def test_a_process_that_exchanged_less_often_catches_up(exchanges):
    """torch would wait for ever otherwise: it numbers the messages of an exchange by process."""
    peers._catch_up([2, 1, 4], 1, torch.device("cpu"))
    assert exchanges == [(0, 1)] * 3
    peers._catch_up([4, 4, 4], 1, torch.device("cpu"))
    assert len(exchanges) == 3


def test_after_an_exchange_that_failed_there_is_no_other(exchanges):
    with pytest.raises(RuntimeError, match="earlier exchange of rank 2's process failed"):
        peers._catch_up([1, 1, None], 1, torch.device("cpu"))
    assert not exchanges


def test_a_failed_exchange_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_num_exchanges", 0)
    with pytest.raises(RuntimeError, match="device type cpu"):
        peers._exchange(torch.zeros(16, dtype=torch.uint8), str(tmp_path), 0, 1)
    assert peers._num_exchanges is None
    with pytest.raises(RuntimeError, match=tmp_path.name):
        dist.distributed_c10d._resolve_process_group(tmp_path.name)


def test_every_rank_hears_that_rank_0_has_no_folder(monkeypatch, two_ranks):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(peers.tempfile, "mkdtemp", lambda prefix: (_ for _ in ()).throw(OSError("no space")))
    said = []
    monkeypatch.setattr(peers, "_agree", lambda problem, hosts: said.append(problem) or 1 / 0)
    with pytest.raises(ZeroDivisionError), peers._folder_of_all(None):
        pass
    assert said == ["no temporary folder: no space"]


def test_a_folder_that_a_rank_does_not_see(tmp_path, two_ranks):
    two_ranks.extend([None, str(tmp_path / "elsewhere")])
    missing = pytest.raises(PeersUnavailable, match=r"rank 0: .*see rank 0's folder .*elsewhere")
    with missing, peers._folder_of_all(None):
        pass


def test_the_folder_of_all_ends_with_rank_0s_context(monkeypatch, two_ranks):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with peers._folder_of_all(None) as folder:
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)
