"""Adapters that are loaded into an enabled model, with the versions of transformers and PEFT that are installed."""

from __future__ import annotations

import pytest
import torch
from support import stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where PEFT saved an adapter, and what the model generates with it."""
    path = tmp_path_factory.mktemp("adapter")
    wrapped = with_adapter(tiny_model(), "one", 5)
    wrapped.save_pretrained(path)
    made = stock_generate(wrapped.get_base_model(), input_ids=IDS, **OPTIONS)
    assert not torch.equal(made, stock_generate(tiny_model(), input_ids=IDS, **OPTIONS))
    return str(path / "one"), made


def native(model, **options):
    """Strict: what is not native raises."""
    return model.generate(input_ids=IDS, **OPTIONS, **options)


def test_by_the_peft_model_around_an_enabled_model(saved):
    path, expected = saved
    model = hf_paged.enable(tiny_model(), strict=True)
    plain = native(model)
    wrapped = peft.PeftModel.from_pretrained(model, path, adapter_name="one")
    wrapped.load_adapter(path, adapter_name="two")
    for name in ("one", "two"):
        wrapped.set_adapter(name)
        assert torch.equal(native(wrapped), expected)
    with wrapped.disable_adapter():
        assert torch.equal(native(wrapped), plain)
    wrapped.delete_adapter("two")
    wrapped.set_adapter("one")
    assert torch.equal(native(wrapped), expected)


def test_by_an_enabled_peft_model(saved):
    path, expected = saved
    wrapped = hf_paged.enable(peft.PeftModel.from_pretrained(tiny_model(), path, adapter_name="one"), strict=True)
    wrapped.load_adapter(path, adapter_name="two")
    assert torch.equal(native(wrapped, adapter_names=["two", "one"]), expected)


@pytest.mark.parametrize("is_enabled_first", [False, True])
def test_a_peft_model_follows_the_engine(saved, is_enabled_first):
    """It names an adapter that it has: else its next forward looks for the config of one that is gone."""
    path, expected = saved
    model = tiny_model()
    if is_enabled_first:
        hf_paged.enable(model, strict=True)
    wrapped = peft.PeftModel.from_pretrained(model, path, adapter_name="one")
    wrapped.load_adapter(path, adapter_name="two")
    engine = hf_paged.get_engine(hf_paged.enable(wrapped, strict=True))

    def named():
        return wrapped.active_adapter, wrapped.active_adapters

    engine.set_adapter("two")
    assert named() == ("two", ["two"]) and torch.equal(native(wrapped), expected)
    engine.set_adapter(["one", "two"])
    assert named() == ("one", ["one", "two"])
    engine.delete_adapter("one")
    assert named() == ("two", ["two"]) and torch.equal(native(wrapped), expected)
    engine.set_adapter(None)
    assert named() == ("two", []) and wrapped.active_peft_config is wrapped.peft_config["two"]
    engine.load_adapter("three", path)
    engine.delete_adapter("two")
    assert named() == ("three", []) and wrapped(IDS).logits.shape[:2] == IDS.shape
    engine.delete_adapter("three")
    assert named() == ([], [])


def test_by_the_model_itself(saved):
    """transformers' own method, where it takes the installed PEFT: the adapter is active, as in stock."""
    path, expected = saved
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True)
    native(model)
    try:
        stock.load_adapter(path, adapter_name="one")
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)[:30]):
            model.load_adapter(path, adapter_name="one")
    else:
        model.load_adapter(path, adapter_name="one")
        assert torch.equal(native(model), expected)


@pytest.mark.parametrize("of_engine", [False, True])
def test_by_a_generator_and_its_engine(saved, of_engine):
    path, expected = saved
    with PagedGenerator(tiny_model()) as generator:
        (generator.engine if of_engine else generator).load_adapter("one", path)
        made = generator.generate(IDS.tolist(), adapter_names="one", **OPTIONS)
        assert [one.token_ids for one in made] == expected[:, 4:].tolist()
        generator.delete_adapter("one")
        with pytest.raises(ValueError, match=r"no adapter 'one'.*Load it with `load_adapter` of the PagedGenerator"):
            generator.generate(IDS.tolist(), adapter_names="one", **OPTIONS)


def test_by_the_engine_of_an_enabled_model(saved):
    path, expected = saved
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    engine.load_adapter("one", path)
    engine.add_request(IDS[0].tolist(), GenerationConfig(**OPTIONS), adapter_name="one")
    ends = []
    while engine.has_unfinished():
        ends += [output.completion for output in engine.step() if output.completion is not None]
    assert ends[0].token_ids == expected[0, 4:].tolist()


def adapted(**options):
    """With adapters "one", which is active, and "two"."""
    wrapped = with_adapter(tiny_model(), "one", 5, scale=0.5, **options)
    return with_adapter(wrapped, "two", 6, scale=0.5, **options)


def made(generator):
    return [one.token_ids for one in generator.generate(IDS.tolist(), **OPTIONS)]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "embed_tokens"], ["q_proj", "nowhere"]])
def test_a_load_that_fails_leaves_the_active_adapter_active(saved, targets):
    path, expected = saved
    model = tiny_model()
    with PagedGenerator(model, strict=True) as generator:
        generator.load_adapter("one", path)
        generator.set_adapter("one")
        with pytest.raises(ValueError):
            generator.load_adapter("two", {}, peft.LoraConfig(target_modules=targets))
        assert {tuple(layer.active_adapters) for layer in model.modules() if "lora_A" in layer._modules} == {("one",)}
        assert made(generator) == expected[:, 4:].tolist()


@pytest.mark.parametrize("method", ["set_adapter", "delete_adapter"])
def test_merged_adapters_are_neither_switched_nor_deleted(method):
    """They would go on in the weights of every row."""
    wrapped = adapted()
    wrapped.merge_adapter(["one"])
    with PagedGenerator(wrapped, strict=True) as generator:
        before, version = made(generator), generator.engine.stats().weights_version
        with pytest.raises(ValueError, match=r"adapters are merged into weights \(one\).*unmerge_adapter"):
            getattr(generator, method)("one")
        assert made(generator) == before and generator.engine.stats().weights_version == version
        wrapped.unmerge_adapter()
        getattr(generator, method)("one")
        generator.delete_adapter("two")


@pytest.mark.parametrize("method", ["set_adapter", "delete_adapter"])
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 6]}],
                         ids=["copies", "tokens"])
def test_adapters_of_more_than_lora_are_switched_by_peft(options, method):
    """Their copies of layers, or of rows, would stay active."""
    with PagedGenerator(wrapped := adapted(**options)) as generator:
        with pytest.raises(ValueError, match=rf"more than LoRA beside layers.*`{method}` of the PeftModel"):
            getattr(generator, method)("one")
        getattr(wrapped, method)("one")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_adapter_that_changes_the_weights_below_is_refused(init, saved):
    path, _ = saved
    with PagedGenerator(tiny_model()) as generator:
        before = made(generator)
        state, config = peft.load_peft_weights(path), peft.PeftConfig.from_pretrained(path)
        config.init_lora_weights = init
        with pytest.raises(ValueError, match=rf"config.init_lora_weights='{init}'.*path_initial_model_for_weight_conv"):
            generator.load_adapter("one", state, config)
        assert made(generator) == before and generator.engine.adapter_names == ()
