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
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_what_is_left_out_of_a_product_is_noticed():
    """Each barrier, wait, fence and copy, a row of a tensor, and the alignment that it was compiled for."""
    pytest.importorskip("triton")
    found = json.loads(run(str(HERE / "simulated_script.py")))
    fault, error = found.pop("nothing")
    assert not fault and error < 1e-4
    faults = {
        "barriers": "without a barrier", "waits for copies": "before it is written", "copies": "before it is written",
        "fences": "without a fence", "waits for products": "before its products", "rows": "an address of no tensor",
        "alignment": "no multiple of it",
    }
    assert {name: text in found[name][0] for name, text in faults.items()} == dict.fromkeys(found, True), found


# One case of a kernel each; of those that follow addresses in tables (LoRA, copies of weights) none.
CASES = [
    "recurrent/test_gated_rms_norm.py::test_the_kernel_is_the_reference[{}-dtype0]",
    "recurrent/test_grouped_rms_norm.py::test_the_kernel_is_the_reference[{}-dtype0]",
    "recurrent/test_packed_convolution.py::test_the_kernel_is_the_reference[{}-dtype0-False-16]",
    "recurrent/test_packed_delta_rule.py::test_bfloat16",
    "recurrent/test_packed_mamba2.py::test_sixteen_bits[size0-dtype1-0.01]",
    "recurrent/test_delta_net.py::test_the_kernel_is_the_reference[{}-dtype0-0]",
    "recurrent/test_mamba2.py::test_the_kernel_is_the_reference[{}-dtype0-0]",
    "experts/test_route.py::test_ties_go_to_lower_numbers[softmax]",
    "experts/test_fold.py::test_a_tile_is_rounded_before_and_behind_its_sum[False-16-True]",
    "layer/test_add_rms_norm.py::test_parts_give_the_same_bits_as_their_sum[2-3-40-dtype1]",
    "layer/test_linear.py::test_parts_add_up_to_the_product[1-3]",
    "layer/test_linear_4bit.py::test_each_value_is_the_references[dtype1-(192, 64, 8)]",
    "layer/test_linear_4bit.py::test_parts_add_up_to_the_product[True]",
    "layer/test_store_kv.py::test_triton[0]",
    "attention/test_paged_attention_triton.py::test_chunks[1]",
    "attention/test_paged_attention_triton.py::test_decode_joins_many_splits",
    "attention/test_windowed.py::test_a_tail_of_a_window_is_exact",
]


def test_compiled_kernels_pass_their_tests():
    pytest.importorskip("triton")
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / case) for case in CASES))
    assert f"{len(CASES)} passed" in out
