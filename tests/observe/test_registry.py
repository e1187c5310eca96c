"""What comes out of a registry: read by prometheus_client's own parser, against the engine's counts."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
from pathlib import Path

import pytest
from support import batch, random_prompts, tiny_model

import hf_paged
from hf_paged import PagedGenerator

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "examples" / "grafana_dashboard.json"
LENGTHS = [30, 17, 25, 9, 31]


def samples(registry, **labels):
    """Values by the names of samples, of those with these labels; what tells several apart is in the key."""
    found = {}
    for family in text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine") and k not in labels}
                found[(sample.name.removeprefix("hf_paged:"), *sorted(own.items()))] = sample.value
    return found


def value(found, name, **labels):
    return found[(name, *sorted(labels.items()))]


@pytest.fixture
def generator():
    with PagedGenerator(tiny_model(), num_blocks=9, max_num_seqs=3) as made:
        yield made


def test_every_count_is_the_engines(generator):
    registry = generator.metrics()
    assert registry is generator.metrics() is hf_paged.metrics(generator.model)
    generator.generate(random_prompts(LENGTHS), max_new_tokens=20)
    generator.model.generate(**batch([9, 4]), max_new_tokens=3)
    found, stats = samples(registry), generator.engine.stats()
    assert stats.num_preemptions > 0
    for name, expected in {
        "generation_tokens_total": stats.num_generated_tokens, "num_steps_total": stats.num_steps,
        "kv_bytes_read_total": stats.kv_bytes_read, "kv_bytes_saved_total": stats.kv_bytes_saved,
        "prompt_tokens_total": stats.num_prefill_tokens + stats.prefix_cache_hits,
        "num_preemptions_total": stats.num_preemptions, "prefix_cache_queries_total": stats.prefix_cache_queries,
        "prefix_cache_hits_total": stats.prefix_cache_hits, "kv_cache_bytes": stats.kv_cache_bytes,
        "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0,
        "time_to_first_token_seconds_count": 7, "e2e_request_latency_seconds_count": 7,
        "request_queue_time_seconds_count": 7, "request_prefill_time_seconds_count": 7,
        "request_decode_time_seconds_count": 7, "inter_token_latency_seconds_count": 106 - 7,
        "request_prompt_tokens_sum": sum(LENGTHS) + 13, "request_generation_tokens_sum": 106,
    }.items():
        assert value(found, name) == expected, name
    assert stats.num_generated_tokens == 106
    assert value(found, "request_success_total", finished_reason="length") == 7
    assert value(found, "request_success_total", finished_reason="error") == 0
    assert value(found, "calls_total", path="native", reason="") == 2
    assert value(found, "call_tokens_total", path="native", reason="") == 106
    assert value(found, "estimated_flops_per_gpu_total") > 0
    assert value(found, "time_to_first_token_seconds_bucket", le="+Inf") == 7
    assert value(found, "request_prompt_tokens_bucket", le="20.0") == 4  # 17, 9, 9 and 4


def test_what_runs_and_waits_and_why(generator):
    registry = generator.metrics()
    engine = generator.engine
    stream = generator.stream(random_prompts([14] * 5), max_new_tokens=60)  # blocks for two to their ends
    next(stream)
    found, stats = samples(registry), engine.stats()
    assert value(found, "num_requests_running") == stats.num_running == 3
    assert value(found, "num_requests_waiting") == stats.num_waiting == 2
    assert value(found, "kv_cache_usage_perc") == pytest.approx((8 - stats.num_free_blocks) / 8)
    assert value(found, "num_requests_waiting_by_reason", reason="slots") == 2
    while not engine.stats().num_preemptions:
        next(stream)
    found = samples(registry)
    assert value(found, "num_requests_waiting_by_reason", reason="preempted") == 1
    reasons = {dict(labels)["reason"]: count for (name, *labels), count in found.items()
               if name == "num_requests_waiting_by_reason"}
    assert sum(reasons.values()) == value(found, "num_requests_waiting") == 3
    assert reasons["slots"] == reasons["step"] == 0 and reasons["blocks"] == 2
    stream.close()
    assert value(samples(registry), "request_success_total", finished_reason="abort") == 5


def test_calls_carry_their_reasons(generator):
    registry = generator.metrics()
    generator.model.generate(**batch([9]), max_new_tokens=2, num_beams=2)
    [(path, reason)] = [(dict(labels)["path"], dict(labels)["reason"]) for (name, *labels), count in
                        samples(registry).items() if name == "calls_total" and count]
    assert path == "lockstep" and reason in generator.engine.stats().calls["lockstep"].by_reason


def test_several_engines_in_one_registry_are_told_apart():
    registry = prometheus_client.CollectorRegistry()
    with PagedGenerator(tiny_model(), num_blocks=9) as first, PagedGenerator(tiny_model(), num_blocks=9) as second:
        assert first.metrics(registry) is second.metrics(registry) is registry
        first.generate([[1, 2]], max_new_tokens=3)
        second.generate([[1, 2]], max_new_tokens=5)
        families = list(text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()))
        assert len({family.name for family in families}) == len(families)
        made = {s.labels["engine"]: s.value for family in families for s in family.samples
                if s.name == "hf_paged:generation_tokens_total"}
        assert sorted(made.values()) == [3, 5]
        assert samples(first.metrics())[("generation_tokens_total",)] == 3  # its own registry has its own alone
        with pytest.raises(ValueError, match="Duplicated"):
            prometheus_client.Counter("hf_paged:generation_tokens", "twice", registry=registry)
    del first, second
    gc.collect()
    families = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
    assert not [sample for family in families for sample in family.samples]


def test_nothing_is_watched_before_somebody_asks(generator):
    assert not generator.engine._core.observers.all
    generator.metrics()
    generator.metrics(prometheus_client.CollectorRegistry())
    assert len(generator.engine._core.observers.all) == 1


def test_reading_while_requests_run_waits_for_no_lock_for_ever(generator):
    registry, read = generator.metrics(), []
    done = threading.Event()

    def scrape():
        while not done.is_set():
            read.append(samples(registry)[("generation_tokens_total",)])

    thread = threading.Thread(target=scrape)
    thread.start()
    generator.generate(random_prompts(LENGTHS), max_new_tokens=30)
    done.set()
    thread.join(20)
    assert not thread.is_alive() and read == sorted(read) and len(set(read)) > 2


def test_without_the_package_the_error_says_what_to_install(generator, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-paged\[metrics\]'"):
        generator.metrics()


def test_a_model_that_is_not_enabled_has_none():
    with pytest.raises(ValueError, match="enable"):
        hf_paged.metrics(tiny_model())


def test_the_page_names_every_metric(generator):
    page = (ROOT / "docs" / "metrics.md").read_text()
    families = text_string_to_metric_families(prometheus_client.generate_latest(generator.metrics()).decode())
    assert [name for family in families if f"`{(name := family.name.removeprefix('hf_paged:'))}`" not in page] == []


# -- the dashboard -----------------------------------------------------------------------------------------------------


def _queries(panels):
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from _queries(panel.get("panels", ()))


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(generator):
    generator.metrics()
    generator.generate(random_prompts([9, 4]), max_new_tokens=3)
    text = prometheus_client.generate_latest(generator.metrics()).decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    labels = {label for family in text_string_to_metric_families(text) for s in family.samples for label in s.labels}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [*_queries(dashboard["panels"]), *(one["query"] for one in dashboard["templating"]["list"]
                                                 if one["type"] == "query")]
    assert len(queries) > 12
    asked = {name for query in queries for name in re.findall(r"hf_paged:\w+", query)}
    assert asked and asked <= names, asked - names
    by = {label.strip() for query in queries for group in re.findall(r"by \(([^)]*)\)", query)
          for label in group.split(",")}
    matched = {label for query in queries for label in re.findall(r"(\w+)=~?\"", query)}
    assert by | matched <= labels, (by | matched) - labels
