"""Launches of the package's kernels, simulated as they are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_paged.kernels.build.compiling import Kernel

from .block import Block, Launch
from .memory import GlobalMemory
from .ptx import Fault, parse

launched: list[str] = []  # names of kernels


def _place(kind: Any, value: Any, memory: GlobalMemory) -> Iterator[int]:
    """The bits of a kernel's arguments, which is a tree like that of their kinds."""
    if isinstance(kind, (tuple, list)):
        for each, part in zip(kind, value, strict=True):
            yield from _place(each, part, memory)
    elif kind != "constexpr":
        if isinstance(value, torch.Tensor):
            yield memory.place(value)
        else:
            yield int(np.float32(value).view(np.uint32)) if kind == "fp32" else int(value)


def run(name: str, compiled: Any, values: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Run all blocks, one after another, over CPU tensors.

    Raises:
        Fault: what a GPU would not do; names kernel and block.
    """
    memory, kinds = GlobalMemory(), compiled.src.signature
    parameters = [bits for key, kind in kinds.items() for bits in _place(kind, values.get(key), memory)]
    sizes = (*grid, 1, 1)[:3]
    launch = Launch(parse(compiled.asm["ptx"]), memory, [*parameters, 0, 0], sizes,  # scratch that no kernel has
                    32 * compiled.metadata.num_warps, compiled.metadata.shared)
    memory.begin()
    for z, y, x in itertools.product(*map(range, reversed(sizes))):
        try:
            Block(launch, (x, y, z)).run()
        except (Fault, NotImplementedError) as fault:
            raise type(fault)(f"{name}, block {(x, y, z)} of {sizes}: {fault}") from None
    memory.end()
    launched.append(name)


def simulate() -> None:
    """From now on launches run, in a process that has `pretended_gpu.pretend` behind it."""
    own = Kernel.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = own(kernel, *args, grid=grid, warmup=warmup, **options)
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        run(kernel.fn.__name__, compiled, values, grid(values) if callable(grid) else grid)
        return compiled

    Kernel.run = launch  # type: ignore[method-assign]
