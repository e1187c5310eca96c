"""The replica of a model that `fully_shard` took, over one rank; tests/parallel/test_sharded_trainers.py has two."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from derived_models import CLASSES, derived_model
from support import batch, run_out, stock_copy, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import hf_paged
from hf_paged.guards.hooks import naming
from hf_paged.parallel.fsdp import is_hook, plain_class
from hf_paged.parallel.replica import Replica

PROMPTS = batch([12, 5])
OPTIONS = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Any, dtype: torch.dtype | None = None) -> Any:
    options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def test_it_is_the_model_of_before_and_the_model_stays_as_it_is():
    whole = tiny_model(tie_word_embeddings=True)
    model = shard(stock_copy(whole), torch.bfloat16)
    parameters, names = list(model.parameters()), [sorted(vars(module)) for module in model.modules()]
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    replica = Replica(model).model
    for (name, ours), (other, theirs) in zip(replica.named_modules(), whole.named_modules(), strict=True):
        assert name == other and type(ours) is type(theirs)
        assert not ours._forward_pre_hooks and not ours._forward_hooks
        assert vars(ours).keys() == vars(theirs).keys()
    assert {parameter.dtype for parameter in replica.parameters()} == {torch.bfloat16}
    assert replica.lm_head.weight is replica.model.embed_tokens.weight
    assert dict(replica.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    assert all(a is b for a, b in zip(replica.buffers(), model.buffers(), strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [sorted(vars(module)) for module in model.modules()] == names
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_its_memory_comes_with_a_meeting_and_goes_with_release():
    model = shard(tiny_model())
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    needed = sum(parameter.nbytes for parameter in tiny_model().parameters())
    replica = engine.replica
    assert (replica.nbytes, replica.bytes_to_come) == (0, needed)
    hf_paged.explain(model, **PROMPTS)
    assert replica.nbytes == 0
    expected = tiny_model().generate(**PROMPTS, **OPTIONS)
    for _ in range(2):
        assert torch.equal(model.generate(**PROMPTS, **OPTIONS), expected)
        assert (engine.stats().shadow_bytes, replica.bytes_to_come) == (needed, 0)
        places = [parameter.data_ptr() for parameter in replica.model.parameters()]
        with torch.no_grad():
            model.model.norm.weight.mul_(1.0)
        model.generate(**PROMPTS, **OPTIONS)
        assert places == [parameter.data_ptr() for parameter in replica.model.parameters()]
        engine.release_memory()
        held = {parameter.untyped_storage().nbytes() for parameter in replica.model.parameters()}
        assert engine.stats().shadow_bytes == 0 and held == {4}


def test_what_changes_in_the_model_changes_in_the_replica():
    """A hook, train mode with dropout, another weight, an attribute that forwards read."""
    model = shard(tiny_model())
    hf_paged.enable(model)

    def path() -> str:
        return hf_paged.explain(model, **PROMPTS).path

    assert path() == "native"
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    assert path() == "stock"
    handle.remove()
    assert path() == "native"
    model.model.layers[0].self_attn.attention_dropout = 0.5
    assert path() == "native"
    model.train()
    assert path() == "stock"
    model.eval()
    before = model.generate(**PROMPTS, **OPTIONS)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 4
    whole = tiny_model()
    for layer in whole.model.layers:
        layer.self_attn.scaling *= 4
    expected = whole.generate(**PROMPTS, **OPTIONS)
    assert torch.equal(model.generate(**PROMPTS, **OPTIONS), expected) and not torch.equal(before, expected)


def test_the_classes_of_fully_shard_and_enable_in_either_order():
    stock = type(tiny_model())
    first = shard(hf_paged.enable(tiny_model()))
    last = hf_paged.enable(shard(tiny_model()))
    for model in (first, last):
        assert isinstance(model, FSDPModule) and plain_class(type(model)) is stock
        assert type(type(model)(tiny_model().config)) is stock  # as FSDP2's own classes do
        hf_paged.disable(model)
        assert type(model).__mro__[1:3] == (FSDPModule, stock)


def test_it_does_not_keep_the_model_alive():
    model = shard(tiny_model())
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation  # a method that lies on the instance
    hf_paged.enable(model, strict=True)
    model.generate(**PROMPTS, **OPTIONS)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_hooks_of_others_are_not_fsdps():
    model = shard(tiny_model())
    own = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    assert len(own) == 2 and all(map(is_hook, own))
    assert not is_hook(lambda *args: None) and not is_hook(torch.nn.Identity())


def test_rows_that_name_adapters():
    """PEFT hangs its hooks on the model's layers, which are not the replica's."""
    pytest.importorskip("peft")
    from lora_models import with_adapter

    expected, calls = [], [{"adapter_names": ["two", "__base__"]}, {}, {"adapter_names": ["one", "two"]}, {}]
    for call in calls:
        expected.append(with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6).generate(
            **PROMPTS, **OPTIONS, **call))
    wrapped = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)
    shard(wrapped.get_base_model())
    hf_paged.enable(wrapped, strict=True)
    for call, tokens in zip(calls, expected, strict=True):
        assert torch.equal(wrapped.generate(**PROMPTS, **OPTIONS, **call), tokens)
    with naming([module for module in wrapped.modules() if hasattr(module, "lora_A")], ["two", "one"]):
        made_meanwhile = Replica(wrapped.get_base_model()).model
    assert not any(module._forward_pre_hooks for module in made_meanwhile.modules())
    assert len({str(tokens) for tokens in expected}) == 3


def test_inside_of_gathered_nothing_runs_on_other_weights_than_the_gathered_ones():
    """Whoever asks: `PagedGenerator` and `add_request` make requests that never meet the other ranks."""
    model = shard(tiny_model())
    prompt = PROMPTS["input_ids"][0].tolist()
    with hf_paged.PagedGenerator(model, num_blocks=64, strict=True) as generator:
        engine = generator.engine
        for spoil in (engine.release_memory, model.lm_head.weight.data.neg_):
            with hf_paged.gathered(model):
                [expected] = generator.generate([prompt], **OPTIONS)
                with pytest.raises(RuntimeError, match="leave the block first"), engine.weight_update():
                    pass
                spoil()
                for ask in (lambda: engine.add_request(prompt), lambda: generator.generate([prompt], **OPTIONS),
                            lambda: model.generate(**PROMPTS, **OPTIONS)):
                    with pytest.raises(RuntimeError, match="the weights of the sharded model changed"):
                        ask()
            with hf_paged.gathered(model):
                [again] = generator.generate([prompt], **OPTIONS)
            assert (again.token_ids == expected.token_ids) == (spoil == engine.release_memory)


def test_no_update_is_announced_under_requests_that_it_would_not_reach():
    """Tokens of gathered weights would count as made by the new ones."""
    model = hf_paged.enable(shard(tiny_model()), strict=True)
    engine = hf_paged.get_engine(model)
    with hf_paged.gathered(model):
        engine.add_request(PROMPTS["input_ids"][0].tolist())
        engine.step()
    with pytest.raises(RuntimeError, match="end them first"), engine.weight_update():
        pass
    run_out(engine)
    with engine.weight_update():
        model.lm_head.weight.data.neg_()
    assert engine.stats().weights_version == 1


@pytest.mark.parametrize(("name", "dtype"), [("Arcee", torch.bfloat16), ("Olmoe", None)])
def test_a_class_that_is_proved(name: str, dtype: torch.dtype | None) -> None:
    """Its proof is about the classes of before, in the dtype of the forward; enabled before or after it is sharded."""
    whole, model, enabled = (derived_model(name, CLASSES[name][0]) for _ in range(3))
    shard(model, dtype)
    hf_paged.enable(enabled, strict=True)
    twin = shard(whole, dtype)
    expected = twin.generate(**PROMPTS, **OPTIONS)
    hf_paged.enable(model, strict=True)
    assert torch.equal(model.generate(**PROMPTS, **OPTIONS), expected)
    assert hf_paged.get_engine(model).replica is not None
    if dtype is None:
        assert torch.equal(shard(enabled).generate(**PROMPTS, **OPTIONS), expected)


def test_a_class_that_is_proved_is_refused_with_the_reason_of_its_sharding() -> None:
    model = shard(derived_model("Arcee", {}))
    model.model.norm.weight.ds_id = 7
    with pytest.raises(hf_paged.UnsupportedModelError, match="the parameters are partitioned by DeepSpeed"):
        hf_paged.enable(model)
