"""The kernel for all layers, from Triton's compiler to its launch, without a GPU; run by `test_one_launch.py`."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from pretended_gpu import GPU, OnGpu, compiled, launched, pretend

from hf_paged.kernels import hopper
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.kernels.hopper.decoder_layers.kernel import layers_kernel
from hf_paged.models import one_launch
from hf_paged.models.one_launch import OneLaunch, Rows

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 1024, 1024, 8, 4, 128


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def decoder() -> support.Decoder:
    shapes = [((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    sizes = [rows * columns for rows, columns in shapes]
    pool, memory = zeros(2, 2, 8, 16, KV_HEADS, SIZE), zeros(2, sum(sizes))
    layers = []
    for i in range(2):
        weights = [part.view(shape) for part, shape in zip(memory[i].split(sizes), shapes, strict=True)]
        layers.append((*weights, *pool[i], zeros(HIDDEN), zeros(HIDDEN), zeros(SIZE), zeros(SIZE)))
    return support.Decoder(tuple(layers), zeros(HIDDEN), 1e-6, 0.1)


def step(one: OneLaunch, of: support.Decoder) -> dict[str, Any]:
    """What came of a step: was it one launch, what was compiled for it, and what was launched."""
    del compiled[:], launched[:]
    integers = torch.zeros(1, dtype=torch.int64)
    rows = Rows(zeros(64, SIZE), zeros(64, SIZE), integers.int(), integers, integers,
                torch.zeros(3, 4, dtype=torch.int32))
    made = one.run(of, zeros(1, HIDDEN), rows)
    return {"made": made is not None, "compiled": list(compiled), "launched": list(launched)}


def main() -> dict[str, Any]:
    hopper.TESTED_TRITON = (".".join(triton.__version__.split(".")[:2]),)
    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    one_launch._is_captured = lambda device: False
    with OnGpu(), torch.inference_mode():
        one, of = OneLaunch(GPU), decoder()
        found = {"missing": step(one, of)}
        assert 1 in one._compiled
        assert one._compiled[1]
        for kernel in one._compiled[1]:
            kernel.result(timeout=200)
        found["meanwhile"] = {"compiled": list(compiled), "launched": list(launched)}
        found["requests run"] = step(one, of)
        one.look_again()
        found["there"] = step(one, of)
        layers_kernel.device_caches.clear()
        found["on the disk"] = step(OneLaunch(GPU), of)
    return found


if __name__ == "__main__":
    pretend()
    print(json.dumps(main()))
