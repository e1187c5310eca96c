"""Metrics of an enabled model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_paged.integration.enable import get_engine
from hf_paged.observe.registry import metrics_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


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
