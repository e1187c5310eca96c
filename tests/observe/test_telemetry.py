"""OpenTelemetry's `gen_ai.server` metrics, read by its SDK."""

from __future__ import annotations

import pytest
import torch
from support import random_prompts, tiny_model

from hf_paged import PagedGenerator
from hf_paged.observe import registry
from hf_paged.observe.registry import telemetry_of

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk.metrics")
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


@pytest.fixture
def reader(monkeypatch):
    """Of a provider that is the process's for the time of a test; it can be set only once otherwise."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield reader
    provider.shutdown()


def points(reader):
    """By name: unit and data points."""
    data = reader.get_metrics_data()
    return {metric.name: (metric.unit, metric.data.data_points) for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics for metric in scope.metrics}


def test_requests_are_recorded_with_their_times(reader):
    with PagedGenerator(tiny_model(), num_blocks=60) as generator:
        generator.metrics()
        made = generator.generate(random_prompts([9, 30]), max_new_tokens=5)
        made += generator.generate([random_prompts([7])[0]], max_new_tokens=1)
    found = points(reader)
    assert set(found) == {"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token",
                          "gen_ai.server.time_per_output_token"}
    times = [one.timings for one in made]
    for name, count, total in (
        ("request.duration", 3, sum(t.ended - t.queued for t in times)),
        ("time_to_first_token", 3, sum(t.first_token - t.queued for t in times)),
        ("time_per_output_token", 2, sum((t.ended - t.first_token) / 4 for t in times[:2])),  # none of a single token
    ):
        unit, [point] = found[f"gen_ai.server.{name}"]
        assert unit == "s" and point.count == count and point.sum == pytest.approx(total)
        assert point.attributes["gen_ai.request.model"] == "Qwen3ForCausalLM"
        assert point.attributes["gen_ai.operation.name"] == "text_completion"


def test_errors_have_a_type_and_requests_without_a_token_no_first_one(reader):
    with PagedGenerator(tiny_model(), num_blocks=9, max_num_seqs=1) as generator:
        generator.metrics()
        stream = generator.stream(random_prompts([9, 9]), max_new_tokens=50, request_ids=["a", "b"])
        next(stream)
        generator.cancel("b")  # it waits for the only slot
        stream.close()
        with torch.no_grad():
            generator.model.lm_head.weight.fill_(float("nan"))
        assert generator.generate([[1, 2]], max_new_tokens=2)[0].finish_reason == "error"
    _, durations = points(reader)["gen_ai.server.request.duration"]
    assert {point.attributes.get("error.type"): point.count for point in durations} == {None: 2, "_OTHER": 1}
    _, [first] = points(reader)["gen_ai.server.time_to_first_token"]
    assert first.count == 1


def test_without_the_sdk_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert telemetry_of("model") is None
    monkeypatch.setattr(registry, "find_spec", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert telemetry_of("model") is None
