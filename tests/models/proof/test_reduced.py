"""Configs of small clones: what belongs to the size of a head shrinks with it."""

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from hf_paged.models.proof.reduced import reduced


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_factors_of_rope_fit_the_part_of_a_smaller_head_that_turns(share):
    """Phi-3 and Phi-4-mini: transformers refuses a config whose factors are of another number."""
    pairs = int(64 * share) // 2
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": share,
            "short_factor": [1.0 + i / 8 for i in range(pairs)], "long_factor": [2.0 + i / 8 for i in range(pairs)]}
    config = Phi3Config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                        original_max_position_embeddings=160, rope_parameters=rope, pad_token_id=0)
    small = reduced(config)
    model = Phi3ForCausalLM(small)
    head = small.hidden_size // small.num_attention_heads
    assert head < 64
    assert len(model.model.rotary_emb.inv_freq) == len(small.rope_parameters["short_factor"]) == int(head * share) // 2
