"""Code that prepares the inputs of forwards, and does otherwise from some length on."""

from __future__ import annotations

import pytest

from hf_paged.models.proof import prove
from tests.models.proof.planted import Change, planted, small_llama

HEAD = "class LlamaForCausalLM(LlamaPreTrainedModel, GenerationMixin):\n"
PREPARE = HEAD + """
    def prepare_inputs_for_generation(self, input_ids, cache=None, position_ids=None, **kwargs):
        if cache and input_ids.shape[1] > self.config.{number}:
            {change}
        return super().prepare_inputs_for_generation(input_ids, cache=cache, position_ids=position_ids, **kwargs)

"""
ANEW = 'cache = kwargs["next_sequence_length"] = None'


OTHERS = "position_ids = position_ids + 1"


@pytest.mark.parametrize(("change", "number", "outcome", "max_length"), [
    (ANEW, "max_position_embeddings", "proved", None),  # as Phi-3 does
    (OTHERS, "max_position_embeddings", "proved", 511),
    (OTHERS, "num_attention_heads * 0 + 100", "open", None),
    pytest.param("input_ids = input_ids.flip(1)", "max_position_embeddings", "proved", 511, marks=pytest.mark.slow),
    pytest.param(ANEW, "max_position_embeddings + 90_000", "open", 89_998, marks=pytest.mark.slow),
])
def test_other_inputs_from_a_length_on(change, number, outcome, max_length, tmp_path):
    """All tokens without a cache, where the next one behind it was due, are what a proof knows; other inputs end it."""
    replaced = (HEAD, PREPARE.format(change=change, number=number))
    verdict = prove(planted(Change("", outcome, replace=replaced), tmp_path), small_llama())
    assert (verdict.outcome, verdict.max_length) == (outcome, max_length)
    assert ("prepare_inputs_for_generation" in verdict.reason) == (outcome == "open")
