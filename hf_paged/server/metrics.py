"""`/metrics` endpoint of the server, with the metrics of every engine in the process."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from hf_paged.integration.engines import ENGINES
from hf_paged.observe.registry import metrics_of
from hf_paged.optional import lacking

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class ServedMetrics:
    """Prometheus registry of one app; without prometheus_client `/metrics` answers with what to install."""

    def __init__(self) -> None:
        self._registry: Any = None
        if find_spec("prometheus_client") is not None:
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()

    def watch(self) -> None:
        """Register all current engines."""
        if self._registry is not None:
            with suppress(RuntimeError):  # a model was enabled during the copy; the next call registers it
                for engine in list(ENGINES.values()):
                    metrics_of(engine, self._registry)

    def answer(self, _: Any) -> Any:
        """Answer `GET /metrics` in Prometheus's text format; waits for running steps.

        OpenMetrics is not offered: prometheus_client (0.26) writes `hf_paged_` for `hf_paged:` there, in samples only.
        """
        from starlette.responses import JSONResponse, Response

        from hf_paged.server.errors import error_body

        if self._registry is None:
            return JSONResponse(error_body(lacking("metrics", "/metrics"), 501), 501)
        from prometheus_client import generate_latest

        self.watch()
        return Response(generate_latest(self._registry), headers={"content-type": _TEXT_FORMAT})
