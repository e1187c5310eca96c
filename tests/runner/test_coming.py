"""While a runner's first kernels are compiled, those of the steps that will come are found and follow them.

In a process of its own, where Triton compiles for a GPU that is not there (`coming_script.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_paged

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")


def looked_at(tmp_path_factory, backend):
    script, root = Path(__file__).with_name("coming_script.py"), Path(hf_paged.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), str(script.parent.parent), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, script, backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return looked_at(tmp_path_factory, "triton")


@pytest.mark.slow
def test_the_kernel_of_prompts_on_hopper_is_compiled_ahead(tmp_path_factory):
    """Once for tiles that are dealt and for those from a queue: the first batch of unlike prompts waits for nothing."""
    found = looked_at(tmp_path_factory, "hopper")
    assert found["behind"].count("_hopper_prefill_kernel") == 1 and "_hopper_prefill_kernel" in found["alone"]
    assert found["missed"] == [] and found["together"] == found["alone"]


def test_a_step_launches_the_same_whether_its_kernels_were_compiled_or_not(found):
    assert found["together"] == found["alone"]
    assert found["threads"] == ["hf_paged-compile"]


def test_every_graph_of_fewer_rows_and_tokens_finds_its_kernels_compiled(found):
    """Batch sizes over which products and attention change their tiles several times."""
    assert found["missed"] == []
    assert max(size for name, size in found["sizes"] if name == "run_padding_rows") == 80
    assert max(size for name, size in found["sizes"] if name == "run_padding_tokens") == 64
    assert found["behind"].count("_decode_kernel") >= 6


def test_layers_of_all_kinds_are_looked_at(found):
    """Two see all positions, two a window; each by itself and behind a prefix that prompts share."""
    assert found["behind"].count("_prefill_kernel") == 4


def test_the_sampler_is_the_same_kernel_for_prompts_and_for_decoding(found):
    """It takes the longest of all to compile."""
    assert found["behind"].count("_choose_kernel") == 1


def test_a_step_looks_tokens_up_by_one_kernel_with_and_one_without_a_place_to_write_from(found):
    assert found["behind"].count("_step_inputs_kernel") == 2
