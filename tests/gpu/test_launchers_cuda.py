"""What launches kernels is made where they are compiled: the first launches call no C compiler (Triton 3.6)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SCRIPT = """
import json, threading
import torch
from triton.runtime import build
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.kernels.layer.silu_mul import silu_mul
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm

built, own = [], build._build
def noting(name, *args, **options):
    built.append((name, threading.current_thread().name))
    return own(name, *args, **options)
build._build = noting

x, weight = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16), torch.ones(128, device="cuda").bfloat16()
def work():
    half = silu_mul(x)
    return half, add_rms_norm(half, half, weight, 1e-6)
half, (normed, total) = compiled_together(work)
expected = torch.nn.functional.silu(x[:, :128]) * x[:, 128:]
print(json.dumps([[thread for name, thread in built if name == "__triton_launcher"],
                  torch.allclose(half, expected, atol=0.02), torch.equal(total, half + half)]))
"""


def test_the_first_launches_call_no_c_compiler(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path),
                                "PYTHONPATH": os.pathsep.join([str(Path(hf_paged.__file__).parents[1]),
                                                               os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    threads, *are_right = json.loads(done.stdout.splitlines()[-1])
    assert are_right == [True, True]
    if not threads:
        pytest.skip("this version of Triton has one function for all launches")
    assert {thread.rpartition("_")[0] for thread in threads} == {"hf_paged-compile"}
