"""A model that goes on talking, for programs whose calls have to last: random weights, the trained tokenizer."""

from __future__ import annotations

import pytest
from support import tiny_model
from transformers import AutoModelForCausalLM

import hf_paged


@pytest.fixture(scope="session")
def talker_path(tmp_path_factory, trained_tokenizer) -> str:
    """A checkpoint as programs load it: config, weights, tokenizer with a chat template, generation config."""
    folder = tmp_path_factory.mktemp("talker")
    model = tiny_model(vocab_size=len(trained_tokenizer), eos_token_id=trained_tokenizer.eos_token_id,
                       pad_token_id=trained_tokenizer.pad_token_id, max_position_embeddings=16384, hidden_size=96,
                       initializer_range=0.1)
    model.save_pretrained(folder)
    trained_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def talker(talker_path):
    model = AutoModelForCausalLM.from_pretrained(talker_path)
    yield model
    hf_paged.disable(model)
