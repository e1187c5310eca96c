"""Metrics of engines as prometheus_client's families, with the names and units of vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.observe.histogram import Histogram
from hf_paged.observe.metrics_recorder import Recorder
from hf_paged.outputs import EngineStats

PREFIX = "hf_paged:"
LABELS = ("model_name", "engine")


class Watched(NamedTuple):
    """An engine whose metrics are recorded, with its label values and recorder."""

    labels: tuple[str, str]
    engine: Engine
    recorder: Recorder


class Reading(NamedTuple):
    """Numbers of one engine, all read between the same two steps."""

    labels: list[str]
    stats: EngineStats
    waiting: dict[str, int]
    config: PagedConfig
    samples: dict[str, Any]  # fields of the recorder by name; histograms as (buckets, sum)


GAUGES = {
    "num_requests_running": "Requests that have a row in every step.",
    "num_requests_waiting": "Requests that wait for a row.",
    "kv_cache_usage_perc": "Part of the KV pool's blocks that requests use; 1 is all of them.",
    "kv_cache_bytes": "Memory of the KV pool.",
    "shadow_bytes": "Memory of copies of weights in the dtype of autocast, or gathered from ranks.",
    "weights_version": "Goes up when the weights were found to be others.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that had to give their blocks back.",
    "prompt_tokens": "Prompt tokens computed, or found in the prefix cache.",
    "generation_tokens": "Tokens made.",
    "num_steps": "Steps launched.",
    "spec_decode_num_draft_tokens": "Guesses at tokens that steps computed.",
    "spec_decode_num_accepted_tokens": "Guesses that came true.",
    "kv_bytes_read": "Bytes of keys and values that attention read, on this device; a prompt's once.",
    "kv_bytes_saved": "Bytes that it did not read again, since rows shared a prefix.",
    "estimated_flops_per_gpu": "Floating-point operations of all steps, estimated from their plans, on this device.",
    "estimated_read_bytes_per_gpu": "Bytes of weights, keys and values of all steps, of each row its own.",
    "estimated_write_bytes_per_gpu": "Bytes of keys and values that all steps wrote.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token", "Between two tokens of a request."),
    "request_time_per_output_token_seconds": ("per_token", "Mean of a request's tokens behind its first."),
    "e2e_request_latency_seconds": ("latency", "From a request's arrival to its end."),
    "request_queue_time_seconds": ("queue", "From a request's arrival to its first step."),
    "request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode", "From a request's first token to its end."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request."),
    "request_generation_tokens": ("generation_tokens", "Tokens made for a request."),
    "iteration_tokens_total": ("step_tokens", "Tokens computed in a step."),
}


def read(watched: Watched) -> Reading:
    """Read an engine's numbers; waits for the running step."""
    engine, recorder = watched.engine, watched.recorder
    with engine.between_steps():
        samples = {name: (value.buckets(), value.sum) if isinstance(value, Histogram) else value
                   for name, value in vars(recorder).items() if not name.startswith("_")}
        samples["finished_by"] = dict(recorder.finished_by)
        return Reading(list(watched.labels), engine.stats(), engine.waiting_by_reason(), engine.config, samples)


def families(readings: list[Reading]) -> Iterator[Metric]:
    """Yield all metric families with the samples of every engine."""
    for name, what in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, what, labels=LABELS)
        for one in readings:
            gauge.add_metric(one.labels, _gauge(name, one.stats))
        yield gauge
    waiting = GaugeMetricFamily(PREFIX + "num_requests_waiting_by_reason", "Requests that wait, by what keeps them.",
                                labels=[*LABELS, "reason"])
    for one in readings:
        for reason, count in one.waiting.items():
            waiting.add_metric([*one.labels, reason], count)
    yield waiting
    for name, what in COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, what, labels=LABELS)
        for one in readings:
            counter.add_metric(one.labels, _count(name, one))
        yield counter
    yield from _counted_by(readings)
    for name, (field, what) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(PREFIX + name, what, labels=LABELS)
        for one in readings:
            buckets, total = one.samples[field]
            histogram.add_metric(one.labels, buckets, total)
        yield histogram
    info = InfoMetricFamily(PREFIX + "cache_config", "How the KV pool is set up.", labels=LABELS)
    for one in readings:
        info.add_metric(one.labels, {
            "block_size": str(one.config.block_size), "num_gpu_blocks": str(one.stats.num_blocks),
            "gpu_memory_utilization": str(one.config.gpu_memory_utilization),
            "enable_prefix_caching": str(one.config.enable_prefix_caching),
        })
    yield info


def _counted_by(readings: list[Reading]) -> Iterator[Metric]:
    success = CounterMetricFamily(PREFIX + "request_success", "Requests that ended, by the reason.",
                                  labels=[*LABELS, "finished_reason"])
    calls = CounterMetricFamily(PREFIX + "calls", "Calls of generate, generate_batch and a PagedGenerator, by the path "
                                "that they took and why it was not the native one.", labels=[*LABELS, "path", "reason"])
    tokens = CounterMetricFamily(PREFIX + "call_tokens", "New tokens of those calls.",
                                 labels=[*LABELS, "path", "reason"])
    for one in readings:
        for reason, count in one.samples["finished_by"].items():
            success.add_metric([*one.labels, reason], count)
        for path, stats in one.stats.calls.items():
            by_reason = {"": stats} if path == "native" else stats.by_reason
            for reason, counted in by_reason.items():
                calls.add_metric([*one.labels, path, reason], counted.num_calls)
                tokens.add_metric([*one.labels, path, reason], counted.num_tokens)
    yield from (success, calls, tokens)


def _gauge(name: str, stats: EngineStats) -> float:
    if name == "kv_cache_usage_perc":  # block 0 is never used
        usable = max(stats.num_blocks - 1, 0)
        return (usable - stats.num_free_blocks) / usable if usable else 0.0
    return getattr(stats, name.replace("num_requests_", "num_"))


def _count(name: str, reading: Reading) -> float:
    stats, work = reading.stats, reading.samples["work"]
    if name == "prompt_tokens":
        return stats.num_prefill_tokens + stats.prefix_cache_hits
    own_names = {"generation_tokens": "num_generated_tokens", "spec_decode_num_draft_tokens": "num_draft_tokens",
                 "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens"}
    estimates = {"estimated_flops_per_gpu": work.flops, "estimated_read_bytes_per_gpu": work.read,
                 "estimated_write_bytes_per_gpu": work.written}
    return estimates[name] if name in estimates else getattr(stats, own_names.get(name, name))
