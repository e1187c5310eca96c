"""Which engines' metrics are in which registry of prometheus_client."""

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
_own: weakref.WeakKeyDictionary[Engine, Any] = weakref.WeakKeyDictionary()  # registries of one engine each
_collectors: weakref.WeakKeyDictionary[Any, EnginesCollector] = weakref.WeakKeyDictionary()  # by registry


class EnginesCollector:
    """A collector of prometheus_client over engines, which it does not keep alive."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def collect(self) -> Iterator[Any]:
        """The families, with one reading of each engine."""
        from hf_paged.observe.metric_families import families, read

        with _lock.rlock:
            found = sorted((one for engine in self.engines if (one := _look_up(engine)) is not None),
                           key=lambda one: int(one.labels[1]))
        return families([read(one) for one in found])

    def describe(self) -> Iterator[Any]:
        """The families without samples: so that a registry refuses other metrics of these names."""
        from hf_paged.observe.metric_families import families

        return families([])


def metrics_of(engine: Engine, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Watch an engine from now on, if nobody asked for that yet; a registry that has its metrics.

    Args:
        registry: to add them to; None: one of the engine's own, the same each time.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    require("metrics", "a registry of metrics")
    from prometheus_client import CollectorRegistry

    watch(engine)  # the engine's lock is never waited for while `_lock` is held
    with _lock.rlock:
        if registry is None:
            registry = _own.setdefault(engine, CollectorRegistry())
        if (collector := _collectors.get(registry)) is None:
            registry.register(collector := EnginesCollector())
            _collectors[registry] = collector
        collector.engines.add(engine)
    return registry


def watch(engine: Engine) -> None:
    """Have an engine's metrics recorded from now on, if nobody asked for that yet."""
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
