"""Whose fault an exception is that came out of the server."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from hf_paged.engine.features.stop_rules import StopRule
from hf_paged.options import arguments, settings
from hf_paged.options.settings import request_spec
from hf_paged.server.errors import settings_error

BROKEN = object()  # no value of any option


def raised_by(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("reads", [
    lambda: request_spec(GenerationConfig(max_new_tokens=1), BROKEN, BROKEN),
    lambda: settings.edits_from_config(BROKEN, (), 10),
    lambda: arguments.merge_config(BROKEN, BROKEN, {}),
    lambda: StopRule(BROKEN, None, []),
], ids=["settings", "edits", "arguments", "stopping"])
def test_what_our_code_raises_while_it_reads_settings_is_their_fault(reads):
    """The client is told why, and the model is not asked whether it is to blame."""
    def model_is_to_blame():
        raise AssertionError("the model is asked")

    reason = settings_error(raised_by(reads), "temperature=x", lambda: "expected a number", model_is_to_blame)
    assert reason is not None and reason.startswith("temperature=x")
