"""What is asked of a GPU: the numbers of AMD's, which torch calls CUDA devices too, are not those of NVIDIA's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_paged
from hf_paged.attention import flash_attn_backend
from hf_paged.attention.registry import resolve_backend
from hf_paged.device import cuda as _device
from hf_paged.kernels import _triton, hopper
from hf_paged.kernels.hopper import decoder_layers_support, prefill_support
from hf_paged.kernels.layer import linear
from hf_paged.models.recurrent import mamba2
from hf_paged.parallel import peers

PACKAGE = Path(hf_paged.__file__).parent
GPU = torch.device("cuda", 0)
# By the function that asks for a compute capability: does it take a GPU for one of NVIDIA's that it suits?
QUESTIONS: dict[str, Callable[[], bool]] = {
    "device/cuda.py:shared_memory": lambda: _device.shared_memory(GPU) > 0,
    "kernels/_triton.py:pdl_supported": lambda: _triton.pdl_supported(GPU),
    "kernels/_triton.py:why_not_on": lambda: _triton.why_not_on(GPU) is None,
    "attention/flash_attn_backend.py:_major": lambda: flash_attn_backend._major(GPU) is not None,
    "kernels/hopper/__init__.py:why_not_on": lambda: hopper.why_not_on(GPU, lambda *_: None) is None,
    "kernels/layer/linear.py:_shared_memory": lambda: linear._shared_memory(GPU) > 0,
    "models/recurrent/mamba2.py:_is_tried": lambda: mamba2._is_tried((64, 128), GPU),
    "parallel/peers.py:_obstacle": lambda: "NVIDIA" not in (peers._obstacle(GPU, 2) or ""),
}
# What differs between makers, or names a generation of one of them.
OF_A_MAKER = {"get_device_capability", "get_arch_list", "get_gencode_flags", "gcnArchName", "major", "minor",
              "is_bf16_supported", "get_current_target"}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that says (9, 0), as an H200 and an MI250 do."""
    cached = [prefill_support.why_not_on, flash_attn_backend._major, _triton.pdl_supported, _device.shared_memory,
              _device.num_multiprocessors, decoder_layers_support._why_not_on, linear._shared_memory]
    for one in cached:
        one.cache_clear()
    properties = type("Properties", (), {"shared_memory_per_block_optin": 232448, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(hopper.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    yield monkeypatch
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("hip", [None, "6.4.43482"], ids=["NVIDIA", "AMD"])
def test_a_capability_is_that_of_an_nvidia_gpu(gpu, hip, question):
    gpu.setattr(torch.version, "hip", hip)
    assert question() is (hip is None)


def test_an_amd_gpu_gets_the_plain_attention_kernels(gpu):
    gpu.setattr(torch.version, "hip", "6.4.43482")
    assert prefill_support.why_not_on(GPU) == "needs an NVIDIA GPU, not 'cuda:0'"
    assert resolve_backend("auto", GPU).name == "triton"


def test_a_cpu_has_no_capability():
    assert _device.compute_capability(torch.device("cpu")) is None


def test_no_question_escapes():
    """Only `compute_capability` asks torch, and each of its callers is among the questions above."""
    asked, found = set(), set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                name = f"{place}:{function.name}"
                asked |= {name for node in nodes if isinstance(node, ast.Attribute) and node.attr in OF_A_MAKER}
                found |= {name for node in nodes if isinstance(node, ast.Name) and node.id == "compute_capability"}
    assert asked == {"device/cuda.py:compute_capability"}
    assert found - {"runner/manifest.py:manifest_path"} == set(QUESTIONS)  # a part of a file's name
