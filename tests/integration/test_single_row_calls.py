"""What one row at a time costs on a CPU, in calls rather than seconds: less than in stock."""

from __future__ import annotations

import sys
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from support import random_prompts, tiny_model

import hf_paged
from hf_paged.guards.snapshot import ModelSnapshot
from hf_paged.kernels.attention import reference


class Calls(NamedTuple):
    """Of Python functions and of C's."""

    python: int
    c: int


def count(model, new_tokens) -> Calls:
    ids, found = torch.tensor(random_prompts([16])), Counter()

    def seen(_frame, event, _argument):
        found[event] += 1

    sys.setprofile(seen)
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                       do_sample=False, eos_token_id=2, pad_token_id=0)
    finally:
        sys.setprofile(None)
    return Calls(found["call"], found["c_call"])


def costs(paged: bool) -> dict[str, Calls]:
    by_layers = {}
    for layers in (2, 6):
        model = tiny_model(num_hidden_layers=layers)
        if paged:
            hf_paged.enable(model, strict=True, enable_prefix_caching=False)
        count(model, 2)  # checks are made, and remembered
        short, long = count(model, 4), count(model, 20)
        by_layers[layers] = Calls(*((b - a) // 16 for a, b in zip(short, long, strict=True))), short
    (token, call), (deep, _) = by_layers[2], by_layers[6]
    return {"layer": Calls(*((b - a) // 4 for a, b in zip(token, deep, strict=True))), "token": token, "call": call}


def test_layers_and_tokens_make_fewer_calls_than_stocks_and_a_short_call_no_more():
    """A call of four tokens, with all of its checks, about as many."""
    ours, stocks = costs(paged=True), costs(paged=False)
    for what, most in {"layer": 0.8, "token": 0.85, "call": 1.1}.items():
        for own, other in zip(ours[what], stocks[what], strict=True):
            assert own <= most * other, (what, ours, stocks)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_laid_out_once_and_the_model_compared_once(rows, monkeypatch):
    """However many layers there are, and a prompt once more for its last token, of which the last layer is computed;
    without a caller's code in between, later steps compare nothing."""
    laid_out, compared = Counter(), Counter()
    own_rows, own_hold = reference.HostRows, ModelSnapshot.hold

    def lay_out(*args):
        laid_out["step"] += 1
        return own_rows(*args)

    def hold(*args):
        compared["call"] += 1
        return own_hold(*args)

    monkeypatch.setattr(reference, "HostRows", lay_out)
    monkeypatch.setattr(ModelSnapshot, "hold", hold)
    model = hf_paged.enable(tiny_model(num_hidden_layers=5), strict=True)
    ids = torch.tensor(random_prompts([9] * rows))
    found = []
    for new_tokens in (2, 2, 12):  # the first makes the checks, which later ones compare with
        laid_out.clear()
        compared.clear()
        model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        assert laid_out["step"] == new_tokens + 1
        found.append(compared["call"])
    assert found[1] == found[2] <= 2
