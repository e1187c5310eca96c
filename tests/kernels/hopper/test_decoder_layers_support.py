"""Where the kernel for all layers runs, and which layers it is given; no GPU is needed to say so."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_paged.device import cuda as _device
from hf_paged.kernels import hopper
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.kernels.hopper.decoder_layers_support import Decoder

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """What is known of an H100."""
    cached = [support._why_not_on, _device.num_multiprocessors, _device.shared_memory]
    for one in cached:
        one.cache_clear()
    properties = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hopper.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    monkeypatch.setattr(support, "_refused", {})
    yield properties
    for one in cached:
        one.cache_clear()


def test_it_runs_on_an_h100_and_not_on_a_cpu(gpu):
    assert support.why_not_on(GPU) is None
    assert support.why_not_on(torch.device("cpu")) == "needs an NVIDIA GPU, not 'cpu'"


@pytest.mark.parametrize(("owner", "name", "value", "reason"), [
    (torch.cuda, "get_device_capability", lambda device=None: (10, 0), "does not run on compute capability 10.0"),
    (torch.cuda, "get_device_capability", lambda device=None: (9, 1), "does not run on compute capability 9.1"),
    (hopper.triton, "__version__", "3.60.0", "was tested with triton 3.6, not 3.60.0"),
    (hopper.triton, "__version__", "3.7.1", "was tested with triton 3.6, not 3.7.1"),
    (hopper.triton.knobs.runtime, "interpret", True, "needs an NVIDIA GPU, not 'cuda:0'"),
    (hopper, "triton", None, "needs triton, which is not installed"),
    (torch.version, "hip", "6.4", "needs an NVIDIA GPU, not 'cuda:0'"),
])
def test_it_does_not_run_elsewhere(gpu, monkeypatch, owner, name, value, reason):
    monkeypatch.setattr(owner, name, value)
    assert support.why_not_on(GPU) == reason


@pytest.mark.parametrize(("name", "value", "reason"), [
    ("multi_processor_count", 114, "needs 128 multiprocessors, not 114"),
    ("shared_memory_per_block_optin", 101376, "needs 232448 bytes of shared memory, not 101376"),
])
def test_it_does_not_run_on_a_part_of_a_gpu(gpu, name, value, reason):
    setattr(gpu, name, value)
    assert support.why_not_on(GPU) == reason


def test_where_it_failed_it_is_not_tried_again_and_that_is_said_once(gpu, caplog):
    for _ in range(2):
        support.refuse(GPU, RuntimeError("too many blocks in cooperative launch"))
    assert "too many blocks" in support.why_not_on(GPU) and caplog.text.count("too many blocks") == 1
    assert support.why_not_on(torch.device("cuda", 1)) is None


def test_it_takes_one_dtype_and_one_size_of_heads():
    assert support.why_not_of(torch.bfloat16, 128) is None
    assert support.why_not_of(torch.float16, 128).endswith("a head_dim of 128, not torch.float16 and 128")
    assert support.why_not_of(torch.bfloat16, 64).endswith("not torch.bfloat16 and 64")


def test_it_pays_off_where_rows_have_use_for_even_shares():
    assert support.pays_off(1, np.array([130_000])) and support.pays_off(8, np.full(8, 30_000))
    assert support.pays_off(8, np.array([1, 2, 1000])) and not support.pays_off(8, np.array([1, 2, 3000]))
    assert not support.pays_off(2, np.array([30_000, 50])) and not support.pays_off(8, np.full(5, 16_000))
    assert not support.pays_off(3, np.full(3, 100)) and not support.pays_off(16, np.full(16, 100))


def decoder(hidden=64, inner=96, heads=4, kv_heads=2, size=128, norms=True, **changed):
    """`changed`: shapes of single fields of the last layer."""
    names = ("qkv", "o", "gate_up", "down", "keys", "values", "input_norm", "post_norm", "q_norm", "k_norm")
    shapes = [((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner),
              *[(3, 16, kv_heads, size)] * 2, (hidden,), (hidden,), *[(size,) if norms else None] * 2]
    layers = []
    for i in range(2):
        of = dict(zip(names, shapes, strict=True)) | (changed if i == 1 or "all" in changed else {})
        layers.append(tuple(None if of[name] is None else torch.empty(of[name], dtype=torch.bfloat16)
                            for name in names))
    return Decoder(tuple(layers), torch.empty(hidden, dtype=torch.bfloat16), 1e-6, 0.1)


def test_layers_that_are_alike():
    assert support.are_alike(decoder()) and support.are_alike(decoder(norms=False))


@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("changed", [
    {"qkv": (896, 64)}, {"o": (64, 384)}, {"gate_up": (96, 64)}, {"down": (64, 48)}, {"values": (3, 16, 1, 128)},
    {"input_norm": (63,)}, {"post_norm": (128,)}, {"q_norm": (64,)}, {"k_norm": None},
], ids=lambda changed: next(iter(changed)))
def test_shapes_that_do_not_go_together(changed, all_of_them):
    assert not support.are_alike(decoder(**changed, **({"all": True} if all_of_them else {})))


def test_a_final_norm_of_another_size():
    assert not support.are_alike(decoder()._replace(final_norm=torch.empty(63, dtype=torch.bfloat16)))


@pytest.mark.parametrize("broken", [decoder(q_norm=(64,)), decoder()._replace(final_norm=torch.empty(64))])
def test_a_plan_of_what_the_kernel_does_not_take_is_refused(broken):
    with pytest.raises(ValueError, match="expected"):
        support.plan_of(broken, 1)


@pytest.mark.parametrize("i", range(10))
def test_the_key_is_another_where_any_tensor_is(i):
    first = decoder()
    layers = [list(layer) for layer in first.layers]
    layers[1][i] = layers[1][i].clone()
    assert first.key() == first._replace(layers=first.layers).key()
    assert first._replace(layers=tuple(map(tuple, layers))).key() != first.key()
    assert first._replace(eps=1e-5).key() != first.key() and first._replace(scale=0.2).key() != first.key()
    assert first._replace(final_norm=first.final_norm.clone()).key() != first.key()


def test_a_graph_keeps_what_the_plan_allocated_and_no_weight():
    norm = torch.nn.Parameter(torch.empty(4))
    plan = SimpleNamespace(table=torch.empty(1), epoch=torch.empty(1), final_norm=norm.data, eps=0.1, shape=(1,))
    assert [t.data_ptr() for t in support.own_tensors(plan)] == [plan.table.data_ptr(), plan.epoch.data_ptr()]


CPU_CALL = """
import sys
import hf_paged
from support import batch, tiny_model

model = hf_paged.enable(tiny_model(head_dim=128), strict=True)
model.generate(**batch([5]), max_new_tokens=3, do_sample=False)
print([name for name in sys.modules if name.startswith("triton.experimental") or "decoder_layers.kernel" in name])
"""


@pytest.mark.slow
def test_a_cpu_imports_no_gluon():
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{CPU_CALL}"],
                          capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
