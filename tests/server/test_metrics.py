"""`GET /metrics` of the server: of the requests that it answered, in Prometheus's text format."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request

import pytest
import torch
from support import tiny_model

import hf_paged

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

QUESTION = [{"role": "user", "content": "What is the code of red-fox?"}]


def get(server, accept=None):
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.headers["content-type"], reply.read().decode()


def sums(server):
    """Values of the server's own samples by name, added up over their labels."""
    samples = [sample for family in text_string_to_metric_families(get(server)[1]) for sample in family.samples]
    # Another test's engine may be alive, under another number.
    newest = max((s.labels["engine"] for s in samples if s.labels["model_name"] == server.path), key=int, default=None)
    found = {}
    for sample in samples:
        if sample.labels["engine"] == newest:
            name = sample.name.removeprefix("hf_paged:")
            found[name] = found.get(name, 0) + sample.value
    return found


def test_answered_requests_are_counted_and_named_after_their_model(server):
    server.chat(QUESTION, max_tokens=3)
    before = sums(server)
    for _ in range(2):
        server.chat(QUESTION, max_tokens=5, temperature=0)
    server.streamed(QUESTION, max_tokens=5, temperature=0)
    after, stats = sums(server), server.engine().stats()
    assert after["request_success_total"] - before["request_success_total"] == 3
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 3
    assert after["generation_tokens_total"] == stats.num_generated_tokens > before["generation_tokens_total"]
    assert after["request_generation_tokens_sum"] == stats.num_generated_tokens  # the first request's, too
    assert f'model_name="{server.path}"' in get(server)[1]


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0"])
def test_names_are_whole_whatever_format_is_accepted(server, accept):
    """Of several engines, too."""
    server.chat(QUESTION, max_tokens=2)
    other = hf_paged.enable(tiny_model())
    other.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)
    content_type, text = get(server, accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert "hf_paged:num_steps_total" in names and all(name.startswith("hf_paged:") for name in names)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("hf_paged:num_steps", "hf_paged:time_to_first_token_seconds"):
        assert len({sample.labels["engine"] for sample in families[name].samples}) >= 2


def test_a_server_under_load_answers_and_runs_on(server):
    answers, done = [], threading.Event()

    def scrape():
        while not done.is_set():
            answers.append(sums(server)["num_steps_total"])

    thread = threading.Thread(target=scrape)
    server.chat(QUESTION, max_tokens=2)
    thread.start()
    text = server.chat(QUESTION, max_tokens=20, temperature=0).choices[0].message.content
    done.set()
    thread.join(30)
    assert answers and answers == sorted(answers)
    assert text == server.chat(QUESTION, max_tokens=20, temperature=0).choices[0].message.content


def test_without_the_package_the_answer_says_what_to_install(monkeypatch):
    from hf_paged.server import app

    monkeypatch.setattr(app, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    endpoint = app.metrics_endpoint()
    answer = endpoint()
    assert answer.status_code == 501 and "hf-paged[metrics]" in json.loads(answer.body)["error"]["message"]
    assert not asyncio.iscoroutinefunction(endpoint)  # it waits for steps: not on the event loop
