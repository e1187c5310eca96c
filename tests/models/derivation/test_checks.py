"""What a proof leaves to check before a model runs by its layout: its two halves, its dtype, and what pages hold."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import pytest
import torch
from derived_models import derived_model
from transformers.models.arcee.modeling_arcee import ArceeForCausalLM, ArceeMLP

from hf_paged.models.derivation.layout import check_pages
from hf_paged.models.derivation.rows_in_dtype import Precision, check_rows_in
from hf_paged.models.derivation.two_halves import check_two_halves
from hf_paged.models.proof.calls import AttentionRecord
from hf_paged.models.proof.mask_kinds import FULL
from hf_paged.models.proof.verdict import Refused


def config():
    return derived_model("Arcee", {}).config


def test_logits_that_need_more_than_final_hidden_states_are_refused(monkeypatch):
    check_two_halves(ArceeForCausalLM, config(), "sdpa")
    stock = ArceeForCausalLM.forward

    @wraps(stock)
    def forward(self, input_ids=None, **kwargs):
        output = stock(self, input_ids=input_ids, **kwargs)
        output.logits = output.logits * (1.0 if input_ids is None else 1.001)
        return output

    monkeypatch.setattr(ArceeForCausalLM, "forward", forward)
    with pytest.raises(Refused, match="logits of the final hidden states of model differ"):
        check_two_halves(ArceeForCausalLM, config(), "sdpa")


def test_a_head_that_counts_the_tokens_of_its_inputs(monkeypatch):
    """As Gemma 4's does, to tell whether its decoder left tokens out."""
    stock = ArceeForCausalLM.forward

    @wraps(stock)
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        output = stock(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        assert output.logits.shape[1] == (input_ids if input_ids is not None else inputs_embeds).shape[1]
        return output

    monkeypatch.setattr(ArceeForCausalLM, "forward", forward)
    check_two_halves(ArceeForCausalLM, config(), "sdpa")


ALL, HALVES = Precision((("", torch.float32),)), (torch.bfloat16, torch.float16)
PRECISIONS = [Precision((("", dtype),)) for dtype in (torch.float32, *HALVES)] + [
    ALL._replace(autocast=dtype) for dtype in HALVES]


@pytest.mark.parametrize("planted", PRECISIONS, ids=str)
def test_rows_that_depend_on_others_in_one_precision_are_refused(planted, monkeypatch):
    check_rows_in(planted, ArceeForCausalLM, config(), "sdpa")
    stock = ArceeMLP.forward

    def forward(self, x):
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        is_planted = (self.up_proj.weight.dtype, cast) == (planted.weights[0][1], planted.autocast)
        return stock(self, x * x.abs().nan_to_num().amax() if is_planted else x)

    monkeypatch.setattr(ArceeMLP, "forward", forward)
    with pytest.raises(Refused, match="depend on the other rows"):
        check_rows_in(planted, ArceeForCausalLM, config(), "sdpa")
    check_rows_in(next(one for one in PRECISIONS if one != planted), ArceeForCausalLM, config(), "sdpa")


def test_attention_in_another_dtype_than_the_pages_is_refused():
    names = ("model.embed_tokens.weight", *(f"model.layers.N.self_attn.{part}_proj.weight" for part in "qkvo"),
             *(f"model.layers.N.mlp.{part}_proj.weight" for part in ("up", "down")), "lm_head.weight",
             "model.norm.weight", *(f"model.layers.N.{part}_layernorm.weight" for part in (
                 "input", "post_attention")))
    precision = Precision((("model.embed_tokens.weight", torch.bfloat16), *((one, torch.float32) for one in names[1:])))
    with pytest.raises(Refused, match="ArceeAttention attends to torch"):
        check_rows_in(precision, ArceeForCausalLM, config(), "sdpa")


def test_layers_of_one_kind_with_several_dtypes():
    made = Precision.of([(f"layers.{layer}.norm.weight", torch.ones(1, dtype=dtype))
                         for layer, dtype in enumerate((torch.float32, torch.float32, torch.float16))])
    assert [name for name, _ in made.weights] == ["layers.N.norm.weight"] * 2
    with pytest.raises(Refused, match="layers of one kind have weights of several dtypes"):
        check_rows_in(made, ArceeForCausalLM, config(), "sdpa")


ONE = AttentionRecord("one", FULL, 4, 2, 16, 16, None, None, False)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"key_size": 520}, "two has heads of 520 numbers"),
    ({"value_size": 520}, "two has heads of 520 numbers"),
    ({"module": "one"}, "one attends more than once in a forward"),
])
def test_calls_that_pages_do_not_hold_are_refused(changes, reason):
    check_pages((ONE, replace(ONE, module="two")))
    with pytest.raises(Refused, match=reason):
        check_pages((ONE, replace(ONE, **{"module": "two"} | changes)))
