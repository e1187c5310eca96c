"""The server of the trained model, and the model as stock runs it."""

from __future__ import annotations

import pytest
import torch
from serve_support import served
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def server(trained_path):
    with served(trained_path) as server:
        yield server


@pytest.fixture(scope="module")
def stock(trained_path):
    return AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32).eval()
