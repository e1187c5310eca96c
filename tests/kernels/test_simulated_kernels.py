"""Kernels as they are compiled for a Hopper GPU, in `simulated_gpu`: what their own tests compare, of some cases, and
that each address is aligned and inside of a tensor, and nothing is read before it is written and made visible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="GPU tests run them")]
HERE = Path(__file__).parent


def run(*command: str) -> str:
    paths = [HERE.parents[1], HERE.parent]
    environment = os.environ | {"TRITON_INTERPRET": "0", "SIMULATED_GPU": "1", "OMP_NUM_THREADS": "1",
                                "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_what_is_left_out_of_a_product_is_noticed():
    """Each barrier, wait, fence and copy, a row of a tensor, and the alignment that it was compiled for."""
    pytest.importorskip("triton")
    found = json.loads(run(str(HERE / "simulated_script.py")))
    fault, error = found.pop("nothing")
    assert not fault and error < 1e-4
    faults = {
        "barriers": "without a barrier", "waits for copies": "before it is written", "fences": "without a fence",
        "waits for products": "before its products", "copies": "before it is written", "rows": "an address of no tensor",
        "alignment": "no multiple of it",
    }
    assert {name: text in found[name][0] for name, text in faults.items()} == dict.fromkeys(found, True), found


@pytest.mark.parametrize(("folder", "chosen"), [
    ("recurrent/test_gated_rms_norm.py", "kernel_is_the_reference"),
    ("recurrent/test_packed_convolution.py", "kernel"),
    ("recurrent/test_packed_delta_rule.py", "bfloat16 or nan_stays"),
    ("recurrent/test_delta_net.py", "kernel_is_the_reference"),
    ("recurrent/test_mamba2.py", "kernel_is_the_reference"),
    ("experts/test_route.py", "ties or nan"),
    ("experts/test_gate_up.py", "sums_are"),
])
def test_compiled_kernels_pass_their_tests(folder, chosen):
    pytest.importorskip("triton")
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreted and not gpu and not slow",
              str(HERE / folder), "-k", chosen)
    assert " passed" in out
