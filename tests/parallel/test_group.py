"""A group that has not met, or has left: its collectives are errors, or rehearsed. Others: test_model_over_ranks."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch_jobs import CPU

from hf_paged.parallel import group as group_module
from hf_paged.parallel.group import SINGLE, ParallelGroup, join

COLLECTIVES = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "all_reduce_max": lambda group: group.all_reduce_max(torch.ones(2)),
    "all_gather": lambda group: group.all_gather(torch.ones(2)),
    "exchange_rows": lambda group: group.exchange_rows(torch.ones(2, 3)),
    "broadcast": lambda group: group.broadcast("a thing"),
    "smallest": lambda group: group.smallest(3),
    "any": lambda group: group.any(True),
    "hosts": lambda group: group.hosts,
}


@pytest.fixture
def other_group():
    """torch's default group, over one rank: what torch would take for a group that is None."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_before_the_ranks_have_met(other_group, name, driven):
    for rank in (0, 1):
        group = ParallelGroup(rank, 2, driven=driven)
        with group.together(), pytest.raises(RuntimeError, match=f"rank {rank} of 2 has not met the others"):
            COLLECTIVES[name](group)


@pytest.mark.parametrize("size", [2, 4])
def test_alone_a_rank_has_what_it_gives_itself(size):
    """In the shapes of all ranks' answers; nobody is waited for, and the caller's check is called each time."""
    group, asked = ParallelGroup(1, size, driven=True), []
    numbers = torch.arange(3.0 * size).view(size, 3)
    with group.alone(lambda: asked.append(1)):
        assert group.all_reduce(numbers) is numbers and group.all_reduce_max(numbers) is numbers
        assert group.all_reduce_add_rms_norm(numbers, None, torch.ones(3), 1e-6) is None
        assert torch.equal(group.all_gather(numbers), torch.stack([numbers] * size))
        assert torch.equal(group.exchange_rows(numbers), torch.cat([numbers[:1]] * size, dim=1))
    assert len(asked) == 4
    with group.together(), pytest.raises(RuntimeError, match="has not met the others"):
        group.all_reduce(numbers)


def test_a_dry_run_comes_to_no_collective_and_sees_the_kernels_of_sums(monkeypatch):
    """Neither to another rank's process, which is none here, nor to the caller's check."""
    noted, numbers = [], torch.arange(6.0).view(2, 3)
    group = ParallelGroup(1, 2, driven=True)
    monkeypatch.setattr(group_module, "is_dry", lambda: True)
    with group.alone(lambda: pytest.fail("it asks whether the others are there")):
        assert group.all_reduce(numbers) is numbers and group.all_reduce_max(numbers) is numbers
        assert group.all_gather(numbers).shape == (2, 2, 3) and group.exchange_rows(numbers).shape == (1, 6)
        assert group.all_reduce_add_rms_norm(numbers, None, torch.ones(3), 1e-6) is None
    group.broadcast_tensor(numbers)
    group.buffers = SimpleNamespace(peers="peers")
    monkeypatch.setattr(group_module, "choose_algorithm_for", lambda tensor, peers: "algorithm")
    for name in ("all_reduce", "all_reduce_add_rms_norm"):
        monkeypatch.setattr(group_module, name, lambda *args, name=name: noted.append((name, *args[-2:])))
    group.all_reduce(numbers)
    group.all_reduce_add_rms_norm(numbers, None, torch.ones(3), 1e-6)
    assert noted == [(name, "peers", "algorithm") for name in ("all_reduce", "all_reduce_add_rms_norm")]
    monkeypatch.setattr(group_module, "is_dry", lambda: False)
    with group.alone(lambda: None):  # no peer has come yet
        assert group.all_reduce(numbers) is numbers
        assert group.all_reduce_add_rms_norm(numbers, None, torch.ones(3), 1e-6) is None
    assert len(noted) == 2


def test_what_the_caller_of_a_rehearsal_learns_ends_it():
    group = ParallelGroup(0, 2)

    def died():
        raise OSError("died")

    with pytest.raises(OSError, match="died"), group.alone(died):
        group.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="has not met the others"):
        group.all_reduce(torch.ones(2))


def test_leaving_is_the_end_of_its_collectives(other_group):
    group = ParallelGroup(0, 1)
    group.meet(CPU)
    assert dist.get_world_size(group.hosts) == 1
    group.leave()
    with pytest.raises(RuntimeError, match="or has left them"):
        assert group.hosts


def test_one_rank_meets_nobody():
    assert join(0, 1, CPU) is SINGLE
    assert SINGLE.broadcast("a thing") == "a thing" and SINGLE.smallest(3) == 3
    logits = torch.ones(2, 3)
    assert SINGLE.all_gather(logits).shape == (1, 2, 3) and SINGLE.all_gather(logits).data_ptr() == logits.data_ptr()
    assert not dist.is_initialized()


class Graphs:
    def __init__(self, log):
        self.log = log

    def drop(self, reason):
        self.log.append("graphs")


def group_that_holds(graphs):
    group = ParallelGroup(0, 1)
    group.meet(CPU)
    group.size = 2  # a group of one has no collectives to hold
    group.holds(graphs)
    return group


def test_graphs_end_before_the_process_groups_of_their_ranks(monkeypatch):
    """NCCL waits for graphs that hold it: a user's destroy_process_group would never return."""
    log = []
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", lambda ranks: log.append("ranks"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = Graphs(log)
    group_that_holds(graphs)  # and is gone
    group = group_that_holds(graphs)
    dist.new_group()
    gc.collect()
    dist.destroy_process_group()
    assert log == ["graphs", *["ranks"] * 4]
    with pytest.raises(RuntimeError, match="or has left them"):
        _ = group.hosts
