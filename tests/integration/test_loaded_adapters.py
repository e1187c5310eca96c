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
