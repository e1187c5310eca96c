"""For scripts that compile kernels on a GPU that nobody has: which one it is, and what a compiled kernel asks for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pretended_gpu import Driver, pretend
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes a block may have


def pretend_to_be(arch: int) -> None:
    """A GPU of such an architecture is the only one."""
    pretend()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=SHARED_MEMORY[arch])
    Driver.get_current_target = lambda self: GPUTarget("cuda", arch, 32)  # type: ignore[method-assign]
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda device=None: properties


def asked_for(kernel: Any) -> dict[str, int]:
    """What the newest compiled variant needs: a thread's registers and bytes of stack (spilled ones), shared memory,
    warps; lines of code."""
    compiled = list(kernel.device_caches[0][0].values())[-1]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(re.search(rf"{name}:(\d+)", usage)[1])  # type: ignore[index]
             for name in ("REG", "STACK")}
    return found | {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
                    "lines": compiled.asm["ptx"].count("\n")}
