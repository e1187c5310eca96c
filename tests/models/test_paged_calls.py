"""Attention calls of a forward over a step: which pools they take, and which forwards have a step at all."""

from __future__ import annotations

import threading

import pytest
import torch
from family_models import family_model
from support import assert_native_parity, batch, stock_generate
from threads import run_threads

import hf_paged
from hf_paged.models import executor, paged_calls
from hf_paged.models.base import AttentionMask

OPTIONS = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize("change", [1, -1])
def test_another_number_of_calls_than_pools_returns_no_token(change, monkeypatch):
    """A forward that makes fewer calls than a step has pools, and one that makes more."""
    model = hf_paged.enable(family_model("olmo2"), strict=True)
    running, count = paged_calls.running, 2 + change
    monkeypatch.setattr(executor, "running", lambda step, calls: running(step, (*calls, AttentionMask(None))[:count]))
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"called attention .* expected \d calls"):
        model.generate(**batch([9]), **OPTIONS)
    monkeypatch.undo()
    assert_native_parity(model, **batch([9]), **OPTIONS)


def test_a_forward_outside_of_a_step_has_no_step(monkeypatch):
    """Neither after a step, nor after one that raised."""
    model, inputs = family_model("olmo2"), batch([30, 9])
    logits = model(**inputs).logits
    hf_paged.enable(model, strict=True)
    model.generate(**inputs, **OPTIONS)
    assert paged_calls._running.forward is None
    with monkeypatch.context() as patch:
        patch.setattr(paged_calls, "store_kv", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(**inputs, **OPTIONS)
    assert paged_calls._running.forward is None
    assert torch.equal(model(**inputs).logits, logits)


def test_a_step_inside_of_a_step_leaves_the_outer_one_its_pools(monkeypatch):
    """One engine's forward runs between two attention calls of another's, in one thread."""
    inner, outer = family_model("olmo2", seed=1), family_model("mistral")
    inputs = batch([9, 21])
    tokens, others = (stock_generate(model, **inputs, **OPTIONS) for model in (outer, inner))
    hf_paged.enable(inner, strict=True)
    hf_paged.enable(outer, strict=True)
    store, results = paged_calls.store_kv, []

    def stored(*args):
        if not results:
            results.append(None)
            results[0] = inner.generate(**inputs, **OPTIONS)
        store(*args)

    monkeypatch.setattr(paged_calls, "store_kv", stored)
    assert torch.equal(outer.generate(**inputs, **OPTIONS), tokens)
    assert torch.equal(results[0], others)


def test_engines_in_several_threads_take_their_own_pools():
    models = [family_model(name, seed=seed) for seed, name in enumerate(("olmo2", "mistral", "olmo2"))]
    inputs = batch([9, 21])
    expected = [stock_generate(model, **inputs, max_new_tokens=20, do_sample=False) for model in models]
    results = {}

    def run(i):
        results[i] = models[i].generate(**inputs, max_new_tokens=20, do_sample=False)

    for model in models:
        hf_paged.enable(model, strict=True)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    run_threads(threads)
    assert all(torch.equal(results[i], expected[i]) for i in range(3))
