"""Map of engines to their recorders and to registries of prometheus_client."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_paged.engine.engine import Engine
from hf_paged.observe.metrics_recorder import Recorder
from hf_paged.observe.telemetry import telemetry_of
from hf_paged.observe.work import sizes_of
from hf_paged.optional import require
from hf_paged.process_lock import ProcessLock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from hf_paged.observe.metric_families import Watched

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
        from hf_paged.observe.metric_families import families, read

        with _lock.rlock:
            found = sorted((one for engine in self.engines if (one := _look_up(engine)) is not None),
                           key=lambda one: int(one.labels[1]))
        return families([read(one) for one in found])

    def describe(self) -> Iterator[Any]:
        """Return the families without samples, so that a registry refuses other metrics with these names."""
        from hf_paged.observe.metric_families import families

        return families([])


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


def _look_up(engine: Engine) -> Watched | None:
    from hf_paged.observe.metric_families import Watched

    found = _watched.get(engine)
    return None if found is None else Watched(found[0], engine, found[1])
