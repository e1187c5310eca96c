"""Where the metrics of engines go: registries of prometheus_client, and OpenTelemetry if its SDK is installed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.engine.engine import Engine
from hf_paged.integration.enable import get_engine
from hf_paged.observe.metrics import (
    FIRST_TOKEN_SECONDS,
    METRICS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    Reading,
    Recorder,
    read,
)
from hf_paged.observe.work import sizes_of
from hf_paged.optional import require
from hf_paged.outputs import Completion
from hf_paged.process_lock import ProcessLock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "hf_paged:"
LABELS = ("model_name", "engine")
_lock = ProcessLock()
_numbers = itertools.count()
_watched: weakref.WeakKeyDictionary[Engine, tuple[tuple[str, str], Recorder]] = weakref.WeakKeyDictionary()
_own: weakref.WeakKeyDictionary[Engine, Any] = weakref.WeakKeyDictionary()  # one registry per engine
_collectors: weakref.WeakKeyDictionary[Any, EnginesCollector] = weakref.WeakKeyDictionary()  # by registry


class EnginesCollector:
    """Collector of prometheus_client over engines, which it references weakly."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def collect(self) -> Iterator[Any]:
        """Return the families, with one reading of each engine."""
        with _lock.rlock:
            found = [(engine, *_watched[engine]) for engine in self.engines]
        return families([read(engine, recorder, labels)
                         for engine, labels, recorder in sorted(found, key=lambda one: int(one[1][1]))])

    def describe(self) -> Iterator[Any]:
        """Return the families without samples, so that a registry refuses other metrics with these names."""
        return families([])


def families(readings: list[Reading]) -> Iterator[Any]:
    """Yield all metrics as families of prometheus_client, with the samples of every engine."""
    from prometheus_client import core

    kinds = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily,
             "histogram": core.HistogramMetricFamily, "info": core.InfoMetricFamily}
    for metric in METRICS:
        family: Any = kinds[metric.kind](PREFIX + metric.name, metric.what, labels=[*LABELS, *metric.labels])
        for one in readings:
            found = metric.of(one)
            for labels, value in found.items() if metric.labels else [((), found)]:
                family.add_metric([*one.labels, *labels], *(value if metric.kind == "histogram" else (value,)))
        yield family


def metrics_of(engine: Engine, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Record an engine's metrics from now on, unless recorded already, and return a registry with them.

    Args:
        registry: Registry to add the metrics to; None for the engine's own registry, the same in every call.

    Raises:
        ImportError: If prometheus_client is not installed.
    """
    require("metrics", "a registry of metrics")
    from prometheus_client import CollectorRegistry

    watch(engine)  # before `_lock`: waiting for the engine's lock while holding `_lock` could deadlock
    with _lock.rlock:
        if registry is None:
            registry = _own.setdefault(engine, CollectorRegistry())
        if (collector := _collectors.get(registry)) is None:
            registry.register(collector := EnginesCollector())
            _collectors[registry] = collector
        collector.engines.add(engine)
    return registry


def watch(engine: Engine) -> None:
    """Record an engine's metrics from now on, unless recorded already."""
    with _lock.rlock:
        if engine in _watched:
            return
        model = engine.model
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        recorder = Recorder(sizes_of(model, engine.cache_spec, engine.group.size), telemetry_of(name))
        _watched[engine] = (name, str(next(_numbers))), recorder
    engine.watch(recorder)


def metrics(model: torch.nn.Module, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Return a prometheus_client registry with the metrics of an enabled model's engine (docs/metrics.md lists them).

        print(prometheus_client.generate_latest(hf_paged.metrics(model)).decode())
        prometheus_client.start_http_server(9090, registry=hf_paged.metrics(model))

    Counters start with the engine; histograms and counts of finished requests start with this function's first call for
    the engine, before which they cost nothing. If OpenTelemetry's SDK is installed, requests are also recorded as its
    `gen_ai.server` metrics, by the meter provider of the process.

    Args:
        model: An enabled model.
        registry: Registry to add the metrics to, such as ``prometheus_client.REGISTRY``; the labels ``model_name`` and
            ``engine`` distinguish engines. None for this engine's own registry, the same in every call.

    Raises:
        ValueError: If the model is not enabled.
        ImportError: If prometheus_client is not installed (``pip install "hf-paged[metrics]"``).
    """
    return metrics_of(get_engine(model), registry)


class Telemetry:
    """`gen_ai.server.*` metrics of one engine, with the process's meter provider, which may be set later."""

    def __init__(self, model_name: str) -> None:
        from opentelemetry import metrics

        meter = metrics.get_meter("hf_paged")

        def seconds(name: str, bounds: tuple[float, ...], what: str) -> Any:
            return meter.create_histogram(f"gen_ai.server.{name}", "s", what,
                                          explicit_bucket_boundaries_advisory=bounds)

        self._duration = seconds("request.duration", REQUEST_SECONDS, "From a request's arrival to its end.")
        self._first_token = seconds("time_to_first_token", FIRST_TOKEN_SECONDS, "From its arrival to its first token.")
        self._per_token = seconds("time_per_output_token", TOKEN_SECONDS, "Mean time of each token behind the first.")
        self._attributes = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "hf_paged",
                            "gen_ai.system": "hf_paged", "gen_ai.request.model": model_name,
                            "gen_ai.response.model": model_name}

    def finished(self, completion: Completion, per_token: float | None) -> None:
        """Record a finished request; `per_token` in seconds, None with fewer than two tokens."""
        times, attributes = completion.timings, self._attributes
        assert times is not None
        if completion.finish_reason == "error":
            attributes = {**attributes, "error.type": "_OTHER"}
        self._duration.record(times.ended - times.queued, attributes)
        if times.first_token is not None:
            self._first_token.record(times.first_token - times.queued, attributes)
        if per_token is not None:
            self._per_token.record(per_token, attributes)


def telemetry_of(model_name: str) -> Callable[[Completion, float | None], None] | None:
    """Return a function that records finished requests of a model; None if OpenTelemetry's SDK is not installed."""
    try:
        found = find_spec("opentelemetry.sdk.metrics")
    except ImportError:
        found = None
    return None if found is None else Telemetry(model_name).finished
