"""Outlines of full-size models say of each attention call what the table of families says."""

from __future__ import annotations

import pytest
import torch

from hf_paged.guards.families import FAMILIES
from hf_paged.models.proof.mask_kinds import FULL, MaskKind
from hf_paged.models.proof.outline import check_alike, outline
from hf_paged.models.proof.reduced import reduced
from tests.models.proof.families import config_of

LAYERS, WINDOW = 4, 64


def windowed(family):
    """A full-size config of four layers, with a window where the family has windows."""
    settings = {"num_hidden_layers": LAYERS}
    if family.windows != "none":
        settings |= {"sliding_window": WINDOW, "use_sliding_window": True}
    if family.windows == "by layer":
        settings["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return config_of(family, **settings)


def windows_of_table(family, config):
    sliding = {"none": [False] * LAYERS, "all": [True] * LAYERS, "by layer": [True, False] * (LAYERS // 2)}
    return [MaskKind("sliding", WINDOW) if one else FULL for one in sliding[family.windows]]


@pytest.mark.parametrize("family", [
    pytest.param(family, id=family.prefix, marks=() if family.prefix in ("Llama", "Gemma2") else pytest.mark.slow)
    for family in FAMILIES
])
def test_an_outline_says_what_the_table_says(family):
    config = windowed(family)
    full = outline(family.model_class, config)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softcap = config.attn_logit_softcapping if family.beyond_sdpa == "softcap" else None
    assert [call.mask for call in full.calls] == windows_of_table(family, config)
    assert [call.module for call in full.calls] == [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
    for call in full.calls:
        assert (call.query_heads, call.key_heads) == heads
        assert call.key_size == call.value_size == size
        assert (call.softcap, call.sinks) == (softcap, family.beyond_sdpa == "s_aux")
    check_alike(full, outline(family.model_class, reduced(config)))


def test_an_outline_draws_no_random_numbers_and_holds_no_weights():
    before = torch.get_rng_state()
    family = next(family for family in FAMILIES if family.prefix == "Llama")
    outline(family.model_class, config_of(family, hidden_size=8192, intermediate_size=100_000))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clone_keeps_two_layers_of_each_kind():
    family = next(family for family in FAMILIES if family.prefix == "Gemma3")
    config = config_of(family, num_hidden_layers=12)
    small = reduced(config)
    assert small.num_hidden_layers == len(small.layer_types) == 4
    assert sorted(small.layer_types) == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert (small.hidden_size, small.sliding_window) == (64, config.sliding_window)


def test_a_clone_has_room_for_the_prompts_of_a_proof():
    family = next(family for family in FAMILIES if family.prefix == "Llama")
    small = reduced(config_of(family, vocab_size=50, max_position_embeddings=48, pad_token_id=49))
    assert (small.vocab_size, small.max_position_embeddings, small.pad_token_id) == (128, 160, 49)
    assert reduced(config_of(family, max_position_embeddings=500)).max_position_embeddings == 500


def test_experts_of_an_odd_size_have_an_outline():
    family = next(family for family in FAMILIES if family.prefix == "Qwen3Moe")
    config = config_of(family, num_hidden_layers=1, hidden_size=65, moe_intermediate_size=33, num_experts=4,
                       num_experts_per_tok=2)
    assert len(outline(family.model_class, config).calls) == 1
