"""The weights checksum: any change of any byte shows, and the kernel computes what its description says."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_paged
from hf_paged.kernels.weights_checksum import CHUNK_BYTES, ChecksumPlan

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def described(tensors: list[torch.Tensor]) -> int:
    """The kernel's function in numpy: sum of mix(word + (index + 1) * golden) over all tensors' zero-padded words."""
    total, index = 0, 0
    for tensor in tensors:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.uint64)
        x = words + np.arange(index + 1, index + 1 + len(words), dtype=np.uint64) * np.uint64(GOLDEN)
        index += len(words)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def tensors_of_all_kinds(seed: int, device: str = "cpu") -> list[torch.Tensor]:
    """Sizes around words, tiles and chunks; odd addresses; every itemsize; empty and 0-dim."""
    torch.manual_seed(seed)
    flat = torch.randn(CHUNK_BYTES + 100, device=device).bfloat16()
    return [
        torch.randn(CHUNK_BYTES // 4 + 3, device=device),
        flat[1 : CHUNK_BYTES // 2 + 40],
        flat[-3:],
        torch.randn(2, 4096, device=device).half(),
        torch.empty(0, 5, device=device),
        torch.tensor(3.5, device=device),
        torch.rand(7, device=device) < 0.5,
        torch.randint(0, 9, (3, 3), device=device),
        torch.randn(6, 8, device=device).t(),
        torch.randn(1024, device=device, dtype=torch.float64),
        torch.randint(0, 255, (11,), device=device, dtype=torch.uint8)[1:],
    ]


def on_cpu(tensors):
    return int(ChecksumPlan()(tensors))


def interpreted(tensors):
    return int(ChecksumPlan().launch([t.contiguous() for t in tensors]))


def on_gpu(tensors):
    return int(ChecksumPlan()([t.cuda() for t in tensors]))


EVERYWHERE = [
    on_cpu,
    pytest.param(interpreted, marks=pytest.mark.interpreted),
    pytest.param(on_gpu, marks=pytest.mark.gpu),
]


@pytest.mark.interpreted
def test_kernel_computes_what_it_says():
    tensors = [t.contiguous() for t in tensors_of_all_kinds(0)]
    assert int(ChecksumPlan().launch(tensors)) == described(tensors)


@pytest.mark.gpu
def test_gpu_kernel_computes_what_it_says():
    tensors = tensors_of_all_kinds(0, "cuda")
    value = ChecksumPlan()(tensors)
    assert value.shape == (1,)
    assert value.dtype == torch.int64
    assert value.is_cuda
    assert int(value) == described(tensors)


@pytest.mark.parametrize("checksum", EVERYWHERE)
def test_every_kind_of_change_shows(checksum):
    r = random.Random(1)
    torch.manual_seed(1)
    base = [torch.randn(400).bfloat16(), torch.randn(400).bfloat16(), torch.randn(3, 50), torch.randn(2500)]
    seen = {checksum(base)}

    def changed(*edits):
        tensors = [t.clone() for t in base]
        for tensor, index, value in edits:
            tensors[tensor].view(-1)[index] = value
        value = checksum(tensors)
        assert value not in seen, edits
        seen.add(value)

    assert checksum([t.clone() for t in base]) in seen
    for which in range(4):
        flat = base[which].view(-1)
        places = r.sample(range(1, flat.numel() - 1), 16)
        for i, j in zip(places[:8], places[8:], strict=True):
            assert flat[i] != flat[j]
            changed((which, i, -flat[i]))
            changed((which, i, flat[j]))
            changed((which, i, flat[j]), (which, j, flat[i]))
            changed((which, i, -flat[i]), (which, j, -flat[j]))
            changed((which, i, flat[i] + 1), (which, j, flat[j] - 1))
        changed((which, 0, float("nan")))
        changed((which, flat.numel() - 1, flat[-1] * 1.01))
    changed((0, 3, base[1][3]), (1, 3, base[0][3]))
    permuted = checksum([base[1], base[0], *base[2:]])
    assert permuted not in seen
    assert checksum([*base[:3], base[3][:-1]]) not in seen


@pytest.mark.parametrize("checksum", EVERYWHERE)
def test_zeros_have_positions_too(checksum):
    zeros = [torch.zeros(600) for _ in range(2)]
    seen = {checksum(zeros)}
    for which, index in [(0, 0), (0, 1), (0, 599), (1, 0), (1, 599)]:
        tensors = [t.clone() for t in zeros]
        tensors[which][index] = -0.0
        seen.add(checksum(tensors))
    assert len(seen) == 6


@pytest.mark.parametrize("checksum", EVERYWHERE)
def test_value_depends_on_contents_not_on_addresses_or_strides(checksum):
    flat = torch.randn(5000).bfloat16()
    spread = torch.randn(40, 60)
    assert checksum([flat[1:], spread.t()]) == checksum([flat[1:].clone(), spread.t().contiguous()])


def test_parameters_and_no_tensors():
    parameter = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
    assert on_cpu([parameter]) == on_cpu([parameter.detach()])
    assert ChecksumPlan()([]).shape == (1,)
    value = ChecksumPlan()([parameter])
    assert value.dtype == torch.int64
    assert not value.requires_grad


def test_two_devices_are_refused():
    with pytest.raises(ValueError, match="device"):
        ChecksumPlan()([torch.zeros(2), torch.zeros(2, device="meta")])


@pytest.mark.interpreted
def test_plan_follows_moved_tensors():
    plan = ChecksumPlan()
    tensors = [torch.randn(50), torch.randn(9)]
    first = int(plan.launch(tensors))
    table = plan._chunks
    tensors[0].add_(1)
    second = int(plan.launch(tensors))
    assert plan._chunks is table
    assert second == described(tensors) != first
    tensors = [tensors[0].clone(), *tensors[1:], torch.randn(3)]
    assert int(plan.launch(tensors)) == described(tensors)


@pytest.mark.gpu
def test_gpu_plan_after_data_writes():
    plan = ChecksumPlan()
    tensors = [torch.randn(5000, device="cuda") for _ in range(20)]
    first = int(plan(tensors))
    tensors[7].data[123] += 1e-3
    second = int(plan(tensors))
    tensors[7] = tensors[7].clone()
    assert first != second == int(plan(tensors)) == described(tensors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")
def test_the_kernel_that_a_thread_compiles_beforehand_is_the_one_that_a_call_launches(tmp_path):
    pytest.importorskip("triton")
    script = Path(__file__).with_name("checksum_script.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(hf_paged.__file__).parents[1]), str(script.parents[1]), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"early": [["_checksum_kernel", "hf_paged-compile"]] * 2, "in the call": [],
                     "launched": ["_checksum_kernel"]}
