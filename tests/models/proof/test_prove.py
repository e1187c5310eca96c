"""A proof of a family, and what it leaves as it was."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, cache_utils, masking_utils, modeling_utils

import hf_paged
from hf_paged.models.proof import interface, prove
from hf_paged.models.proof.interface import ProofThread
from tests.models.proof.families import KNOWN
from tests.models.proof.planted import small_llama
from tests.support import tiny_model


@pytest.mark.parametrize("prefix", [
    pytest.param(prefix, marks=() if prefix in ("Llama", "Phi3") else pytest.mark.slow) for prefix in KNOWN
])
def test_a_class_is_proved(prefix):
    known = KNOWN[prefix]
    config = known.config()
    verdict = prove(known.model_class, config, known.attention)
    assert verdict.outcome == "proved", verdict
    if prefix == "Phi3":
        config.max_position_embeddings = 131_072  # of 4,096 by default
    assert verdict.max_length is None or verdict.max_length >= config.max_position_embeddings - 2 >= 131_070
    assert verdict.max_step_tokens == 8_200 and 0 < verdict.seconds < 100


def test_the_accepted_verdicts_have_these_classes():
    """`tools/model_verdicts.py` makes the list, which takes too long for a test."""
    accepted = json.loads((Path(__file__).parent / "verdicts.json").read_text())["classes"]
    assert {accepted[f"{prefix}ForCausalLM"]["outcome"] for prefix in KNOWN} == {"proved"}
    assert {one["outcome"] for one in accepted.values()} == {"proved", "open", "refused"}


def test_a_length_too_far_to_try_ends_the_proof():
    verdict = prove(LlamaForCausalLM, small_llama(max_position_embeddings=50_000))
    assert (verdict.outcome, verdict.max_length) == ("proved", 49_998)


def test_two_runs_give_the_same_verdict(stored_here):
    first = prove(LlamaForCausalLM, small_llama())
    for file in stored_here.iterdir():
        file.unlink()
    assert replace(prove(LlamaForCausalLM, small_llama()), seconds=0.0) == replace(first, seconds=0.0)


def test_nothing_of_the_caller_changes():
    model = tiny_model(max_position_embeddings=128)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    holders = [masking_utils, modeling_utils, cache_utils, sys.modules[Qwen3ForCausalLM.__module__], torch, torch.nn]
    globals_before = [{name: id(value) for name, value in vars(holder).items()} for holder in holders]
    config, state = copy.deepcopy(model.config.__dict__), (torch.get_rng_state(), random.getstate())

    def trace(frame, event, argument):
        return None

    before, traced = sys.gettrace(), threading.gettrace()
    sys.settrace(trace)
    try:
        verdict = prove(model)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert verdict.outcome == "proved" and threading.gettrace() is traced
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert torch.get_default_dtype() is torch.float32 and not torch.is_inference_mode_enabled()
    assert model.config.__dict__ == config and all(torch.equal(model.state_dict()[name], weights[name])
                                                   for name in weights)
    assert [{name: id(value) for name, value in vars(holder).items()} for holder in holders] == globals_before


def test_modes_of_the_calling_thread_do_not_reach_the_proof():
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert prove(LlamaForCausalLM, small_llama(max_position_embeddings=64)).outcome == "proved"


def test_another_thread_generates_at_the_same_time():
    model, ids = tiny_model(), torch.arange(1, 20)[None]
    wanted = model.generate(ids, max_new_tokens=10, do_sample=False)
    with ThreadPoolExecutor(1) as pool:
        proved = pool.submit(prove, model)
        while not proved.done():
            assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), wanted)
    assert proved.result().outcome == "proved"


def test_an_enabled_model_is_proved_as_stock():
    model = tiny_model(max_position_embeddings=96)
    hf_paged.enable(model)
    try:
        assert prove(model).outcome == "proved"
    finally:
        hf_paged.disable(model)


def test_an_interrupt_of_the_caller_ends_the_proof(monkeypatch):
    started, threads, forwards = threading.Event(), [], []
    end_if_stopped = interface.end_if_stopped

    def counted():
        started.set()
        forwards.append(threading.current_thread())
        end_if_stopped()

    def interrupted(thread):
        threads.append(thread)
        assert started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(interface, "end_if_stopped", counted)
    monkeypatch.setattr(ProofThread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove(LlamaForCausalLM, small_llama())
    threading.Thread.join(threads[0], 60)
    assert not threads[0].is_alive() and len(forwards) < 4


class _Failing(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        raise ZeroDivisionError("of a forward")


@pytest.mark.parametrize(("arguments", "reason"), [
    ((_Failing, small_llama()), "ZeroDivisionError.*of a forward"),
    ((LlamaForCausalLM, small_llama(), "flash_attention_2"), "flash_attention_2"),
    ((LlamaForCausalLM, object()), "does not run"),
    ((torch.nn.Linear(2, 2),), "does not run"),
    ((transformers.BloomForCausalLM, transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4)),
     "takes no position_ids"),
])
def test_an_error_is_a_refusal(arguments, reason, stored_here):
    verdict = prove(*arguments)
    assert verdict.outcome == "refused" and re.search(reason, verdict.reason), verdict
    assert bool(list(stored_here.glob("*.json"))) == ("takes no" in reason)  # an error may be the machine's: not stored


def test_a_default_dtype_other_than_float32_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        assert "default dtype" in prove(LlamaForCausalLM, small_llama()).reason
    finally:
        torch.set_default_dtype(torch.float32)

