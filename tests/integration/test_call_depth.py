"""How many functions of ours lie between `model.generate` and the attention of an eager decode step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from support import tiny_model

import hf_paged
from hf_paged.attention.torch_backend import TorchBackend

PACKAGE = Path(hf_paged.__file__).parent
MOST = 13  # the backend's own call included


def own_functions_on_the_stack() -> list[str]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_generate_reaches_the_attention_backend_in_few_calls(monkeypatch):
    """A layer that only forwards a call costs its reader a file and every step its time."""
    stacks, own = [], TorchBackend.run

    def run(*args, **kwargs):
        stacks.append([*own_functions_on_the_stack(), "backend"])
        return own(*args, **kwargs)

    monkeypatch.setattr(TorchBackend, "run", run)
    model = hf_paged.enable(tiny_model(), enforce_eager=True)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert stacks
    assert all("generate_" in stack and "attend" in stack for stack in stacks)
    assert max(map(len, stacks)) <= MOST, stacks[-1]
