"""Outlines of full-size models say of each attention call what is known of the class."""

from __future__ import annotations

import pytest
import torch

from hf_paged.models.proof.mask_kinds import FULL, MaskKind
from hf_paged.models.proof.outline import check_alike, outline
from hf_paged.models.proof.reduced import reduced
from tests.models.proof.families import KNOWN

LAYERS, WINDOW = 4, 64


def windowed(known):
    """A full-size config of four layers, with a window where the class has windows."""
    settings = {"num_hidden_layers": LAYERS}
    if known.windows != "none":
        settings |= {"sliding_window": WINDOW, "use_sliding_window": True}
    if known.windows == "by layer":
        settings["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return known.config(**settings)


def known_windows(known):
    sliding = {"none": [False] * LAYERS, "all": [True] * LAYERS, "by layer": [True, False] * (LAYERS // 2)}
    return [MaskKind("sliding", WINDOW) if one else FULL for one in sliding[known.windows]]


@pytest.mark.parametrize("prefix", [
    pytest.param(prefix, marks=() if prefix in ("Llama", "Gemma2") else pytest.mark.slow) for prefix in KNOWN
])
def test_an_outline_says_what_is_known(prefix):
    known = KNOWN[prefix]
    config = windowed(known)
    full = outline(known.model_class, config)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softcap = config.attn_logit_softcapping if known.beyond_sdpa == "softcap" else None
    assert [call.mask for call in full.calls] == known_windows(known)
    assert [call.module for call in full.calls] == [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
    for call in full.calls:
        assert (call.query_heads, call.key_heads) == heads
        assert call.key_size == call.value_size == size
        assert (call.softcap, call.sinks) == (softcap, known.beyond_sdpa == "s_aux")
    check_alike(full, outline(known.model_class, reduced(config)))


def test_an_outline_draws_no_random_numbers_and_holds_no_weights():
    before = torch.get_rng_state()
    known = KNOWN["Llama"]
    outline(known.model_class, known.config(hidden_size=8192, intermediate_size=100_000))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clone_keeps_two_layers_of_each_kind():
    known = KNOWN["Gemma3"]
    config = known.config(num_hidden_layers=12)
    small = reduced(config)
    assert small.num_hidden_layers == len(small.layer_types) == 4
    assert sorted(small.layer_types) == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert (small.hidden_size, small.sliding_window) == (64, config.sliding_window)


def test_a_clone_has_room_for_the_prompts_of_a_proof():
    known = KNOWN["Llama"]
    small = reduced(known.config(vocab_size=50, max_position_embeddings=48, pad_token_id=49))
    assert (small.vocab_size, small.max_position_embeddings, small.pad_token_id) == (128, 160, 49)
    assert reduced(known.config(max_position_embeddings=500)).max_position_embeddings == 500


def test_experts_of_an_odd_size_have_an_outline():
    known = KNOWN["Qwen3Moe"]
    config = known.config(num_hidden_layers=1, hidden_size=65, moe_intermediate_size=33, num_experts=4,
                       num_experts_per_tok=2)
    assert len(outline(known.model_class, config).calls) == 1
