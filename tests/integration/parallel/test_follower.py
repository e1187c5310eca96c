"""What `load_on_ranks` refuses before a process is started; no test here keeps other ranks."""

from __future__ import annotations

import pytest

from hf_paged import PagedGenerator


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_sizes_that_are_none(trained_path, size):
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=size)


@pytest.mark.parametrize("device", ["cuda:1", "meta"])
def test_devices_that_ranks_do_not_take(trained_path, device):
    expected = f"device='{device}': expected 'cuda', of which the ranks take 0 to 1, or 'cpu'"
    with pytest.raises(ValueError, match=expected):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=2, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_of_another_number_of_processes(trained_path, monkeypatch, device):
    """Under torchrun; said before anybody waits for the others, or takes a GPU that is not there."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: expected 1 or 3, the number of processes"):
        PagedGenerator.from_pretrained(trained_path, tensor_parallel_size=2, device=device)
