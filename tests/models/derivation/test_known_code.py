"""Norms, gated MLPs and RoPE of classes that repeat known code are computed by kernels, with the modules' numbers."""

from __future__ import annotations

import gc
import inspect
import sys
import textwrap
import weakref
from collections import Counter
from types import FunctionType

import pytest
import torch
from derived_models import CLASSES, derived_model
from image_models import image_model
from outlines import outlined
from recurrent_models import outlined as recurrent_outlined
from recurrent_models import recurrent_model, with_idiom
from support import assert_native_parity, batch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_paged
from hf_paged.kernels.layer import rms_norm, rotary, silu_mul
from hf_paged.models.derivation import known_code
from hf_paged.models.derivation.known_code import is_same_code

ALL = {"rms_norm", "rotary", "silu_mul_parts"}
OPS = {"rms_norm": rms_norm.rms_norm_triton, "rotary": rotary.rotary_triton, "silu_mul_parts": silu_mul._launch}


@pytest.fixture
def seen(monkeypatch):
    """Calls of the operations, which run as on a GPU, in plain torch."""
    found = Counter()

    def count(name, own):
        monkeypatch.setattr(known_code, name, lambda *args: (found.update([name]), own(*args))[1])

    for name in OPS:
        count(name, getattr(known_code, name))
    monkeypatch.setattr(known_code, "why_not_on", lambda device: None)
    return found


@pytest.mark.parametrize(("name", "found"), [
    ("Exaone4", ALL), ("Olmo", {"silu_mul_parts"}), ("Gemma", {"rms_norm", "rotary"}), ("Glm4Moe", ALL),
    ("DeepseekV3", {"rms_norm", "silu_mul_parts"}), ("FlexOlmo", {"rms_norm"}), ("OPT", set()),
    ("Persimmon", {"rotary"}),
])
def test_tokens_are_stocks(name, found, seen):
    model = outlined(derived_model(name, CLASSES[name][0]))
    hf_paged.enable(model, strict=True, max_num_batched_tokens=19, max_num_seqs=6)
    assert_native_parity(model, **batch([30, 17, 9]), max_new_tokens=6)
    assert seen.keys() == found


@with_idiom
@pytest.mark.parametrize(("name", "found"), [("Qwen3_5", ALL), ("Bamba", ALL), ("Lfm2", {"rms_norm", "rotary"})])
def test_tokens_of_models_with_states_are_stocks(name, found, seen):
    """Whose attention layers have decorated forwards."""
    model = hf_paged.enable(recurrent_outlined(recurrent_model(name)), strict=True)
    assert_native_parity(model, **batch([30, 17, 9]), max_new_tokens=6)
    assert seen.keys() == found


def test_image_models_are_taken_too(seen):
    model = hf_paged.enable(image_model("qwen2.5-vl"), strict=True)
    assert_native_parity(model, **batch([30, 9]), max_new_tokens=4)
    assert seen.keys() == ALL


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["Exaone4", "Gemma", "Glm4Moe"])
def test_kernels_give_the_numbers_of_the_modules(name, seen, monkeypatch):
    for op, kernel in OPS.items():
        monkeypatch.setattr(known_code, op, kernel)
    model = hf_paged.enable(outlined(derived_model(name, CLASSES[name][0])), strict=True)
    assert_native_parity(model, **batch([12, 5]), max_new_tokens=3)


class OtherParameter(nn.Parameter):
    """Of a library, with a memory of its own."""


@torch.no_grad()
@pytest.mark.parametrize("weight", [torch.randn(2 * 64)[::2], torch.full((1,), 2.0).expand(64), torch.tensor(0.7),
                                    torch.randn(3, 1, 64), torch.randn(64).as_subclass(OtherParameter)])
def test_norms_with_other_weights_than_plain_ones_run_by_themselves(weight, seen):
    """The kernel reads as many values as x has columns, one behind the other."""
    norm, x = LlamaRMSNorm(64), torch.randn(5, 64)
    forward, = known_code._forwards_of(norm)
    assert torch.allclose(forward(x), norm(x), atol=1e-5) and seen == {"rms_norm": 1}
    norm.weight = nn.Parameter(weight) if type(weight) is torch.Tensor else weight
    assert torch.equal(forward(x), norm(x)) and seen == {"rms_norm": 1}


def test_released_engines_keep_no_module_alive(seen):
    model = hf_paged.enable(outlined(derived_model("Exaone4", {})), strict=True)
    model.generate(**batch([9]), max_new_tokens=3)
    assert seen["rms_norm"]
    hf_paged.get_engine(model).release_memory()
    former, model.model.norm = weakref.ref(model.model.norm), LlamaRMSNorm(model.config.hidden_size)
    gc.collect()
    assert former() is None


def test_nothing_of_transformers_is_changed(seen):
    """Another thread may call the same modules."""
    model = outlined(derived_model("Glm4Moe", CLASSES["Glm4Moe"][0]))
    file = sys.modules[type(model).__module__]
    before = dict(vars(file)), {name: kind.forward for name, kind in vars(file).items() if hasattr(kind, "forward")}
    assert_native_parity(hf_paged.enable(model, strict=True), **batch([9]), max_new_tokens=3)
    assert seen["rotary"]
    assert before[0] == vars(file) and all(vars(file)[name].forward is forward for name, forward in before[1].items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("why", ["option", "device", "autocast"])
def test_there_are_none(why, seen, monkeypatch):
    if why == "device":
        monkeypatch.setattr(known_code, "why_not_on", lambda device: "a test")
    model = outlined(derived_model("Exaone4", {}))
    hf_paged.enable(model, strict=True, fused_kernels=why != "option")
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        model.generate(**batch([9]), max_new_tokens=3)
    assert not seen


def llama_with(line, other):
    """Llama's norm with one line in place of another, compiled anew."""
    source = textwrap.dedent(inspect.getsource(LlamaRMSNorm.forward))
    assert line in source
    scope = {}
    exec(f"import torch\n{source.replace(line, other, 1)}", scope)
    return scope["forward"]


@pytest.mark.parametrize(("line", "other", "is_same"), [
    ("input_dtype = hidden_states.dtype", "'''A docstring.'''; input_dtype = hidden_states.dtype", True),
    ("(-1, keepdim=True)", "(-1, keepdim=False)", False), ("pow(2)", "pow(3)", False),
    ("variance_epsilon", "eps", False), ("torch.float32", "torch.float64", False),
    ("variance + ", "variance - ", False),
    ("self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states).to(input_dtype)", False),
])
def test_another_instruction_is_other_code(line, other, is_same):
    assert is_same_code(llama_with(line, other), known_code._llama_norm) is is_same


@pytest.mark.parametrize("change", [
    lambda norm, x: (norm, x.double()), lambda norm, x: (norm.half(), x), lambda norm, x: (norm, x.mT.contiguous().mT),
], ids=["float64", "another dtype", "strides"])
def test_a_norm_computes_itself_what_the_kernel_does_not_take(change, monkeypatch):
    monkeypatch.setattr(known_code, "rms_norm", None)
    norm, x = change(LlamaRMSNorm(8), torch.randn(2, 3, 8))
    forward, = known_code._forwards_of(norm)
    assert torch.equal(forward(x), norm(x)) and torch.equal(forward(hidden_states=x), norm(x))


def test_other_functions_are_no_code():
    assert not is_same_code(None, known_code._llama_norm) and not is_same_code(print, known_code._llama_norm)
    with_default = FunctionType(known_code._whole_rotary.__code__, {}, "same", (2,))
    assert not is_same_code(with_default, known_code._whole_rotary)
