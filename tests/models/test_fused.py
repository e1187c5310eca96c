"""Llama and Qwen3-MoE run fused, like Qwen3: every technique gives stock's tokens, and the parameters stay theirs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from family_models import VARIANTS, family_model
from support import HostMemory, assert_native_parity, batch, random_prompts, stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.models import find_executor, linears
from hf_paged.models import fused as fused_executor
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.fused import FusedExecutor
from hf_paged.models.layer_ops import FUSED as FUSED_OPS
from hf_paged.models.linears import LinearView

FUSED = ["llama", "llama-3", "qwen3-moe", "qwen3-moe-mixed"]


@pytest.mark.parametrize(("variant", "executor"), [
    *((variant, FusedExecutor) for variant in FUSED), ("gemma3", DerivedExecutor), ("gpt-oss", DerivedExecutor),
])
def test_which_executor_a_family_gets(variant, executor):
    assert find_executor(family_model(variant)).func is executor


@pytest.mark.each_value
@pytest.mark.parametrize("variant", FUSED)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_with_and_without_each_technique(variant, merge, fused):
    model = hf_paged.enable(family_model(variant), strict=True, merge_weights=merge, fused_kernels=fused)
    assert_native_parity(model, **batch([3, 17, 40]), max_new_tokens=16)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe-mixed"])
def test_other_activations(variant, activation):
    """The kernels compute SiLU: these run by their own modules."""
    model = hf_paged.enable(family_model(variant, hidden_act=activation), strict=True)
    assert type(hf_paged.get_engine(model)._executor) is DerivedExecutor
    assert_native_parity(model, **batch([17, 40]), max_new_tokens=16)


@pytest.mark.parametrize(("variant", "dense_layers"), [("llama", [0, 1]), ("qwen3-moe", []), ("qwen3-moe-mixed", [0])])
def test_projections_lie_side_by_side_while_enabled(variant, dense_layers, monkeypatch):
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    model, inputs = family_model(variant), batch([9])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = stock_generate(model, **inputs, max_new_tokens=4)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **inputs, max_new_tokens=4)
    for i, layer in enumerate(model.model.layers):
        groups = [(layer.self_attn, ("q_proj", "k_proj", "v_proj"))]
        groups += [(layer.mlp, ("gate_proj", "up_proj"))] if i in dense_layers else []
        for owner, names in groups:
            weights = [getattr(owner, name).weight for name in names]
            ends = [w.data_ptr() + w.numel() * w.element_size() for w in weights]
            assert ends[:-1] == [w.data_ptr() for w in weights[1:]]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    hf_paged.disable(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4), expected)


def in_two_parts(calls):
    """A product as sums over the two halves of its columns; `calls` gets the number of its rows."""
    def parts(x, weight, bias):
        assert bias is None
        calls.append(len(x))
        half = x.shape[1] // 2
        return torch.stack([x[:, :half] @ weight[:, :half].T, x[:, half:] @ weight[:, half:].T])

    return parts


@pytest.mark.parametrize("make", [tiny_model, partial(family_model, "llama")], ids=["qwen3", "llama"])
def test_products_in_parts_are_added_up_by_who_reads_them(make, monkeypatch):
    """The product of q, k and v where it has a merged weight, which these do on a CPU that is told to merge."""
    calls = []
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    monkeypatch.setattr(fused_executor, "makes_parts", lambda device: True)
    monkeypatch.setattr(fused_executor, "FUSED", FUSED_OPS._replace(linear_parts=in_two_parts(calls)))
    model = hf_paged.enable(make(), strict=True)
    executor = hf_paged.get_engine(model)._executor
    executor._ops = fused_executor.FUSED
    assert_native_parity(model, **batch([9, 4]), max_new_tokens=6)
    assert len(calls) == 6 * 3 * len(model.model.layers)


def test_what_goes_on_with_a_product_takes_it_whole_and_not_in_parts(monkeypatch):
    """LoRA's kernels add to it, biases come in the product, and modules are called as they stand."""
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    monkeypatch.setattr(fused_executor, "makes_parts", lambda device: True)
    model = hf_paged.enable(tiny_model(), strict=True)
    model.generate(**batch([5]), max_new_tokens=2)
    executor = hf_paged.get_engine(model)._executor
    for layer in executor._layer_parts:
        assert all(view.linear is FUSED_OPS.linear_parts for view in (layer.qkv, layer.o_proj, layer.down_proj))
        assert layer.gate_up.linear is FUSED_OPS.linear
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert executor._view("0.o_proj").linear is FUSED_OPS.linear
    assert executor._view("1.o_proj").linear is FUSED_OPS.linear_parts
    adapters = SimpleNamespace(group=lambda of: object(), base=lambda linear: linear)
    monkeypatch.setattr(executor._linears, "adapters", adapters)
    for key in ("0.qkv", "1.o_proj", "0.down_proj"):
        assert executor._view(key).linear is FUSED_OPS.linear


def test_head_norms_with_different_epsilons():
    model = hf_paged.enable(family_model("qwen3-moe"))
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.1
    reason = hf_paged.get_engine(model).unsupported_reason()
    assert reason == "layer 1's q_norm and k_norm have different epsilons"


def test_weights_changed_in_place_are_seen():
    model = hf_paged.enable(family_model("qwen3-moe"), strict=True)
    inputs = batch([40, 9])
    before = assert_native_parity(model, **inputs, max_new_tokens=8)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(-1)
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), before)


@pytest.mark.parametrize(("options", "last"), [({}, 2), ({"prompt_logprobs": True}, 14)])
def test_the_last_layer_computes_what_is_read_of_it(monkeypatch, options, last):
    """The last token of each prompt, or all tokens where they are scored; of layers before it all are read."""
    computed, own = [], LinearView.silu_mul

    def silu_mul(self, hidden, *args):
        computed.append(len(hidden))
        return own(self, hidden, *args)

    monkeypatch.setattr(LinearView, "silu_mul", silu_mul)
    model = tiny_model()
    with hf_paged.PagedGenerator(model, num_blocks=50) as generator:
        made = generator.generate(random_prompts([9, 5]), max_new_tokens=3, do_sample=False, use_tqdm=False, **options)
    layers = model.config.num_hidden_layers
    assert computed == [*[14] * (layers - 1), last, *[2] * layers * 2]
    for prompt, completion in zip(random_prompts([9, 5]), made, strict=True):
        stock = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert completion.token_ids == stock[0, len(prompt) :].tolist()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_last_tokens_are_those_of_a_step_that_computes_all(variant):
    """Rows that decode, a chunk in the middle of a prompt and one at its end; every family, also under adapters."""
    model = family_model(variant)
    with hf_paged.PagedGenerator(model, num_blocks=60, max_num_batched_tokens=24, max_num_seqs=8) as generator:
        executor, compared = generator.engine._executor, []
        own = executor.hidden_states

        def hidden_states(ids, step):
            if step.ends is None:
                return own(ids, step)
            every = own(ids, step._replace(ends=None))
            alone = own(ids, step)
            compared.append(len(alone))
            torch.testing.assert_close(alone, every[step.ends.tokens], rtol=1e-4, atol=1e-5)
            return alone

        executor.hidden_states = hidden_states
        configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in (4, 5, 3)]
        generator.generate(random_prompts([9, 30, 14]), configs, use_tqdm=False)
        del executor.hidden_states
    assert len(compared) >= 2 and max(compared) >= 2


# -- shapes ------------------------------------------

READ = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim", "hidden_size": "head_dim"}


def executor_of(model):
    return find_executor(model)(model)


@pytest.mark.parametrize("name", fused_executor._SHAPES)
def test_the_spec_follows_the_config(name):
    """Whichever field changes after it was read once."""
    model = tiny_model()
    if name == "hidden_size":  # it gives the size of heads where nothing else does
        vars(model.config)["head_dim"] = None
    executor = executor_of(model)
    before = executor.kv_spec()
    setattr(model.config, name, getattr(model.config, name) // 2)
    after = executor.kv_spec()
    assert getattr(after, READ[name]) < getattr(before, READ[name])


@pytest.mark.parametrize("variant", FUSED)
def test_every_fused_config_has_these_fields_under_these_names(variant):
    model = family_model(variant)
    config = executor_of(model).config
    assert not {*fused_executor._SHAPES} & config.attribute_map.keys()
    assert {*fused_executor._SHAPES} - {"head_dim"} <= vars(config).keys()
    assert not any(isinstance(getattr(type(config), name, None), property) for name in fused_executor._SHAPES)


def test_a_config_whose_layers_differ_is_noticed():
    """As by transformers, which refuses to say what holds for some layers."""
    model = tiny_model()
    if not hasattr(type(model.config), "per_layer_config"):
        pytest.skip("this version's configs know one value for all layers")
    executor = executor_of(model)
    executor.kv_spec()
    model.config.per_layer_config = {0: {"num_key_value_heads": 1}}
    with pytest.raises(Exception, match="is a per-layer attribute"):
        executor.kv_spec()


def test_the_spec_follows_the_number_of_ranks():
    model = tiny_model()
    executor = executor_of(model)
    whole = executor.kv_spec()
    model.parallel_group = SimpleNamespace(size=2)
    shared = executor.kv_spec()
    assert (2 * shared.num_heads, 2 * shared.num_kv_heads) == (whole.num_heads, whole.num_kv_heads)


def test_the_spec_follows_weights_layers_and_autocast():
    model = tiny_model()
    executor = executor_of(model)
    found = [executor.kv_spec()]
    model.to(torch.float64)
    found.append(executor.kv_spec())
    executor.autocast = torch.bfloat16
    found.append(executor.kv_spec())
    del model.model.layers[-1]
    found.append(executor.kv_spec())
    model.to("meta")
    found.append(executor.kv_spec())
    assert [spec.compute_dtype for spec in found] == [torch.float32, *[torch.float64] * 4]
    assert [spec.cache_dtype for spec in found[1:]] == [torch.float64, *[torch.bfloat16] * 3]
    assert found[3].num_layers == found[2].num_layers - 1 and found[4].device.type == "meta"
