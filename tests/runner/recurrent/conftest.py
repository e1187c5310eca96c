"""What tests of packed prompts look at."""

from __future__ import annotations

import pytest

from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.models.recurrent.view import StateView


@pytest.fixture
def forwards(monkeypatch):
    """New tokens of the rows of each forward of prompts; layers read no state by themselves."""
    seen, hidden_states = [], RecurrentExecutor.hidden_states

    def watched(self, input_ids, step):
        seen.append(step.parts[0][2].query_start.diff().tolist())
        return hidden_states(self, input_ids, step)

    read = StateView._read

    def checked(self, key):
        assert (self._lengths is None and self._is_new is False) or self.num_rows == 1, "a prompt gathers states"
        return read(self, key)

    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    monkeypatch.setattr(RecurrentExecutor, "hidden_states", watched)
    monkeypatch.setattr(StateView, "_read", checked)
    return seen
