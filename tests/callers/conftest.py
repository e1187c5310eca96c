"""What programs of others need: a model that goes on talking, since their calls last; no accelerator left over.

All these tests are slow: the core tier does not even import the programs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from support import tiny_model
from transformers import AutoModelForCausalLM

import hf_paged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


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
def no_accelerator_left():
    """Trainers keep accelerate's state, which the process shares, and the next one would take it over."""
    _forget_accelerator()
    yield
    _forget_accelerator()


def _forget_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def talker(talker_path):
    model = AutoModelForCausalLM.from_pretrained(talker_path)
    yield model
    hf_paged.disable(model)
