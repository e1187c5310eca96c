"""The switches for A/B runs: with a technique off, the same tokens by other means."""

import pytest
from support import HostMemory, assert_native_parity, batch, random_prompts, tiny_model

import hf_paged
from hf_paged.kernels import qk_norm_rope_store as fused_op
from hf_paged.models import fused as fused_adapter
from hf_paged.models.layer_ops import FUSED, PLAIN

SWITCHES = [{}, {"merge_weights": False}, {"fused_kernels": False}, {"merge_weights": False, "fused_kernels": False}]


@pytest.mark.parametrize("off", SWITCHES, ids=lambda off: "+".join(off) or "all on")
def test_a_switch_changes_the_means_and_no_token(off, monkeypatch):
    monkeypatch.setattr(fused_adapter, "adjacent_memory", HostMemory)
    model = hf_paged.enable(tiny_model(), strict=True, **off)
    assert_native_parity(model, **batch([5, 17, 9]), max_new_tokens=8, do_sample=False)
    adapter = hf_paged.get_engine(model)._adapter
    assert adapter._ops is (PLAIN if "fused_kernels" in off else FUSED)
    assert all((p.weight is None) == ("merge_weights" in off) for p in adapter._qkv + adapter._gate_up)


def test_merge_weights_off_leaves_every_parameter_where_it_is(monkeypatch):
    monkeypatch.setattr(fused_adapter, "adjacent_memory", HostMemory)
    model = tiny_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    hf_paged.enable(model, merge_weights=False, strict=True)
    assert_native_parity(model, **batch([5, 17]), max_new_tokens=4, do_sample=False)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_fused_kernels_off_calls_no_fused_kernel(monkeypatch):
    def fail(*_):
        raise AssertionError("a fused op was called")

    monkeypatch.setattr(fused_op, "_check", fail)
    model = hf_paged.enable(tiny_model(), fused_kernels=False, strict=True)
    assert_native_parity(model, **batch([5]), max_new_tokens=4, do_sample=False)


@pytest.mark.gpu
@pytest.mark.parametrize("off", SWITCHES[1:], ids="+".join)
def test_gpu_switches_work_in_graphs_and_make_the_same_tokens(off):
    """fp32, where torch's and our rounding do not decide a token."""
    made = []
    for switches in ({}, off):
        model = tiny_model().cuda()
        with hf_paged.PagedGenerator(model, num_blocks=100, max_num_seqs=4, **switches) as generator:
            completions = generator.generate(random_prompts([5, 40, 17, 3, 60]), max_new_tokens=12, do_sample=False,
                                             eos_token_id=None, use_tqdm=False)  # fmt: skip
            assert generator.engine.stats().num_graphs_captured > 0
        made.append([completion.token_ids for completion in completions])
    assert made[0] == made[1]
