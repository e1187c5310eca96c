"""The switches for A/B runs: with a technique off, the same tokens by other means."""

import sys
from functools import partial
from pathlib import Path
from types import CodeType

import pytest
import torch
from family_models import family_model
from support import HostMemory, assert_native_parity, batch, random_prompts, tiny_model

import hf_paged
from hf_paged.kernels.layer import qk_norm_rope_store as fused_op
from hf_paged.models import linears
from hf_paged.models.layer_ops import FUSED, PLAIN, apply_module
from hf_paged.runner.model_runner import ModelRunner

SWITCHES = [{}, {"merge_weights": False}, {"fused_kernels": False}, {"merge_weights": False, "fused_kernels": False}]


@pytest.mark.parametrize("off", SWITCHES, ids=lambda off: "+".join(off) or "all on")
def test_a_switch_changes_the_means_and_no_token(off, monkeypatch):
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    model = hf_paged.enable(tiny_model(), strict=True, **off)
    assert_native_parity(model, **batch([5, 17, 9]), max_new_tokens=8, do_sample=False)
    executor = hf_paged.get_engine(model)._executor
    assert executor._ops is (PLAIN if "fused_kernels" in off else FUSED)
    merged = [view.weight is not None for layer in executor._layer_parts for view in (layer.qkv, layer.gate_up)]
    assert set(merged) == {"merge_weights" not in off}


def test_merge_weights_off_leaves_every_parameter_where_it_is(monkeypatch):
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    model = tiny_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    hf_paged.enable(model, merge_weights=False, strict=True)
    assert_native_parity(model, **batch([5, 17]), max_new_tokens=4, do_sample=False)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_fused_kernels_off_calls_no_fused_kernel(monkeypatch):
    def fail(*_):
        raise AssertionError("a fused op was called")

    monkeypatch.setattr(fused_op, "qk_norm_rope_store_host", fail)
    model = hf_paged.enable(tiny_model(), fused_kernels=False, strict=True)
    assert_native_parity(model, **batch([5]), max_new_tokens=4, do_sample=False)


def argument_checks():
    """Code of hf_paged's functions that look at tensors to refuse some."""
    for path in sorted(Path(hf_paged.__file__).parent.glob("**/*.py")):
        if path.parent.name in ("kernels", "layer", "attention", "sampling", "models"):
            pending = [compile(path.read_text(), str(path), "exec")]
            while pending:
                code = pending.pop()
                pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
                if "ValueError" in code.co_names or code.co_name == "check_tensors":
                    yield code.co_filename, code.co_name, code.co_firstlineno


@pytest.mark.parametrize(("make", "off", "least", "most"), [
    (tiny_model, {}, 0, 0), (tiny_model, {"fused_kernels": False}, 0, 0),
    (partial(family_model, "qwen2"), {}, 8, 19),  # attention modules that are not ours hand tensors in
])
def test_an_eager_decode_step_does_not_check_its_own_tensors(make, off, least, most, monkeypatch):
    """Arguments are looked at where they come in from outside, not in every layer of every step."""
    checks, steps = set(argument_checks()), []
    assert {name for _, name, _ in checks} > {"check_tokens", "check_attention", "check_tensors"}

    def entered(frame):
        code = frame.f_code
        return (code.co_filename, code.co_name, code.co_firstlineno) in checks

    def count(frame, event, _):
        if event == "call" and (entered(frame) or entered(frame.f_back)):
            steps[-1] += 1

    def launch(runner, plan, *rest):
        steps.append(0)
        sys.setprofile(count)
        try:
            return own(runner, plan, *rest)
        finally:
            sys.setprofile(None)

    own = ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "launch", launch)
    model = hf_paged.enable(make(num_hidden_layers=4), strict=True, **off)
    model.generate(**batch([5, 9]), max_new_tokens=6, do_sample=False)
    assert all(least <= step <= most for step in steps), steps


@pytest.mark.parametrize("path", [
    "model.norm.weight", "model.layers.1.self_attn.q_norm.weight", "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight", "lm_head.weight",
])
@pytest.mark.parametrize("used", [False, True])
def test_a_weight_of_another_shape_is_refused_before_a_kernel_reads_past_its_end(path, used):
    model = hf_paged.enable(tiny_model(), strict=True)
    if used:
        model.generate(**batch([5]), max_new_tokens=2)
    parameter = model.get_parameter(path)
    parameter.data = parameter.data[..., :-2].clone()
    name = path.split(".")[-2]
    with pytest.raises(ValueError, match=rf"{name}\.weight: torch.float32 .* expected torch.float32 \["):
        model.generate(**batch([5]), max_new_tokens=2)


def test_what_a_called_module_returns_is_looked_at():
    layer = torch.nn.Identity()
    assert apply_module(layer, torch.zeros(3, 4)).shape == (3, 4)
    for bad in (torch.zeros(1, 3, 4).half(), torch.zeros(1, 4, 3).transpose(1, 2), torch.zeros(3, 4)):
        layer.forward = lambda _, bad=bad: bad
        with pytest.raises(ValueError, match=r"Identity returned torch\.float.* expected torch.float32 \[T, n\]"):
            apply_module(layer, torch.zeros(3, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("off", SWITCHES[1:], ids="+".join)
def test_gpu_switches_work_in_graphs_and_make_the_same_tokens(off):
    """fp32, where torch's and our rounding do not decide a token."""
    made = []
    for switches in ({}, off):
        model = tiny_model().cuda()
        with hf_paged.PagedGenerator(model, num_blocks=100, max_num_seqs=4, **switches) as generator:
            completions = generator.generate(random_prompts([5, 40, 17, 3, 60]), max_new_tokens=12, do_sample=False,
                                             eos_token_id=None, use_tqdm=False)
            assert generator.engine.stats().num_graphs_captured > 0
        made.append([completion.token_ids for completion in completions])
    assert made[0] == made[1]
