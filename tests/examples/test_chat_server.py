"""examples/chat_server.py: OpenAI's client gets the facts from a real server, and its metrics say what it did."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "chat_server.py"


@pytest.mark.slow
def test_clients_get_the_facts_and_the_one_that_left_is_ended(capfd):
    spec = importlib.util.spec_from_file_location("chat_server", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    streamed, answers, lines = example.main([])
    assert str(example.FACTS["red-fox"]) in streamed
    for code, answer in zip(example.FACTS.values(), answers, strict=True):
        assert str(code) in answer
    families = text_string_to_metric_families("".join(f"{line}\n" for line in lines))
    values = {(sample.name, sample.labels.get("finished_reason")): sample.value for family in families
              for sample in family.samples}
    assert values["hf_paged:request_success_total", "eos"] == 7
    assert values["hf_paged:request_success_total", "abort"] == 1
    assert values["hf_paged:num_requests_running", None] == 0
    assert values["hf_paged:prefix_cache_hits_total", None] > 0
    assert streamed in capfd.readouterr().out
