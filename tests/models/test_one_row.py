"""A step of one row is one launch over all layers where a decoder is as the kernel takes it, and else as ever."""

from functools import partial

import pytest
import torch
from family_models import family_model
from support import HostMemory, batch, tiny_model

import hf_paged
from hf_paged.kernels.one_row_layers import Workspace, can_be_shared
from hf_paged.models import fused as fused_executor
from hf_paged.models import one_row
from hf_paged.runner.step_context import PagedStep

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
PROGRAMS, NEW = 8, 5


@pytest.fixture
def launches(monkeypatch):
    """The kernel runs where it can, in the interpreter; the positions that it was launched for."""
    positions = []
    run = one_row.one_row_layers_unchecked

    def counted(*args):
        positions.append(int(args[8]))
        return run(*args)

    def decode_row(step):
        meta = step.parts[0][2]
        return meta if len(step.parts) == 1 and len(step.positions) == 1 else None

    monkeypatch.setattr(fused_executor, "adjacent_memory", HostMemory)
    monkeypatch.setattr(one_row, "one_row_layers_unchecked", counted)
    monkeypatch.setattr(one_row, "takes",
                        lambda shape, dtype, device: dtype.itemsize == 2 and can_be_shared(shape, PROGRAMS))
    monkeypatch.setattr(one_row, "Workspace", partial(Workspace, programs=PROGRAMS))
    monkeypatch.setattr(PagedStep, "decode_row", decode_row)
    return positions


def half(model):
    """In fp16, rounded alike by the interpreter and by torch."""
    return model.half()


@pytest.mark.interpreted
@pytest.mark.parametrize("make", [partial(tiny_model, num_hidden_layers=2), partial(family_model, "llama")],
                         ids=["qwen3", "llama"])
def test_one_row_is_one_launch_a_step(make, launches):
    inputs = batch([9])
    plain = hf_paged.enable(half(make()), strict=True, fused_kernels=False)
    expected = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert not launches
    model = hf_paged.enable(half(make()), strict=True)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), expected)
    assert launches == list(range(9, 9 + NEW - 1))
    # Several rows take the other way, and so does whoever is one of them.
    two = model.generate(**batch([9, 4]), max_new_tokens=NEW, do_sample=False)
    assert len(launches) == NEW - 1
    assert two.shape == (2, 9 + NEW)


@pytest.mark.interpreted
def test_the_table_follows_weights_that_move(launches):
    model = hf_paged.enable(half(tiny_model(num_hidden_layers=2)), strict=True)
    inputs = batch([5])
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    layers = hf_paged.get_engine(model)._executor._one_row
    table, before = layers._table, layers._table.clone()
    down = model.model.layers[1].mlp.down_proj.weight
    down.data = down.data.clone() * -1.0
    expected = hf_paged.enable(half(_with_down(down.data)), strict=True, fused_kernels=False)
    actual = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(actual, expected.generate(**inputs, max_new_tokens=4, do_sample=False))
    assert layers._table is table
    assert (table != before).nonzero().tolist() == [[1, 3]]
    assert len(launches) == 5


def _with_down(weight):
    model = tiny_model(num_hidden_layers=2)
    model.model.layers[1].mlp.down_proj.weight.data = weight.clone().float()
    return model


@pytest.mark.parametrize("make", [
    lambda: tiny_model(attention_bias=True, num_hidden_layers=2),
    lambda: tiny_model(hidden_act="gelu", num_hidden_layers=2),
    lambda: tiny_model(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=0),
    lambda: family_model("qwen3-moe-mixed"),
], ids=["bias", "gelu", "window", "experts"])
def test_layers_that_are_not_as_the_kernel_takes_them(make, launches):
    model = hf_paged.enable(half(make()), strict=True)
    model.generate(**batch([6]), max_new_tokens=3, do_sample=False)
    assert not launches


@pytest.mark.parametrize("options", [{"merge_weights": False}, {"fused_kernels": False}])
def test_switches_that_leave_the_layers_apart(options, launches):
    model = hf_paged.enable(half(tiny_model(num_hidden_layers=2)), strict=True, **options)
    model.generate(**batch([6]), max_new_tokens=3, do_sample=False)
    assert not launches


def test_norms_that_differ(launches):
    model = half(tiny_model(num_hidden_layers=2))
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    hf_paged.enable(model, strict=True).generate(**batch([6]), max_new_tokens=3, do_sample=False)
    assert not launches


def test_fp32_takes_the_other_way(launches):
    hf_paged.enable(tiny_model(num_hidden_layers=2), strict=True).generate(**batch([6]), max_new_tokens=3)
    assert not launches


def test_a_hook_takes_the_other_way(launches):
    model = half(tiny_model(num_hidden_layers=2))
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(hf_paged.FallbackWarning, match="hook"):
        hf_paged.enable(model).generate(**batch([6]), max_new_tokens=3, do_sample=False)
    assert seen
    assert not launches
