"""Code that is compiled without a GPU, and the scripts that compile it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hf_paged


def disassembled(cubin: bytes) -> str:
    """The instructions, as nvdisasm of Triton prints them."""
    import triton  # by the script alone: here kernels may be interpreted

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lines_of(script: Path, arguments: list[Any], timeout: float) -> list[Any]:
    """The JSON lines that a script prints for these arguments, where kernels are compiled and not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(hf_paged.__file__).parents[1], Path(__file__).parent)))
    done = subprocess.run([sys.executable, str(script), *map(json.dumps, arguments)], env=environment, text=True,
                          capture_output=True, check=True, timeout=timeout)
    return [json.loads(line) for line in done.stdout.splitlines()]
