"""Adapters that are loaded by PEFT's own functions: stock's logits, and what is said of those that cannot be."""

from __future__ import annotations

import pytest
import torch
from support import random_prompts, tiny_model

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

from hf_paged.integration.adapters import adapter_names, load_adapter  # noqa: E402

IDS = torch.tensor(random_prompts([12]))


@pytest.fixture(params=[{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["lora", "dora", "saved"])
def saved(request, tmp_path):
    """Where two adapters lie that PEFT saved, and the logits under each of them by PEFT."""
    wrapped = tiny_model()
    for seed, name in enumerate(("red", "blue")):
        wrapped = with_adapter(wrapped, name, seed, ("q_proj", "down_proj"), **request.param)
    wrapped.save_pretrained(tmp_path)
    logits = {}
    for name in ("red", "blue"):
        wrapped.set_adapter(name)
        logits[name] = wrapped(IDS).logits
    return tmp_path, logits


def test_logits_are_pefts_and_none_is_active_before_it_is_asked_for(saved):
    path, expected = saved
    model = tiny_model()
    plain = model(IDS).logits
    for name in expected:
        load_adapter(model, name, str(path / name))
        assert torch.equal(model(IDS).logits, plain)
    assert adapter_names(model) == ["blue", "red"]
    for name, logits in expected.items():
        for layer in model.modules():
            if isinstance(layer, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.ModulesToSaveWrapper)):
                layer.set_adapter([name])
        assert not torch.equal(logits, plain)
        assert torch.equal(model(IDS).logits, logits)


def test_what_cannot_be_loaded(saved, tmp_path):
    path, _ = saved
    model = tiny_model()
    load_adapter(model, "red", str(path / "red"))
    for name in ("red", "a.b", "", "__base__"):
        with pytest.raises(ValueError, match="expected a name without dots that no adapter of the model has"):
            load_adapter(model, name, str(path / "red"))
    with pytest.raises(OSError, match=r"adapter 'other': there is no adapter at .*nowhere"):
        load_adapter(model, "other", str(tmp_path / "nowhere"))
