"""The metrics of an enabled model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_paged.integration.enable import get_engine
from hf_paged.observe.registry import metrics_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def metrics(model: torch.nn.Module, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """A registry of prometheus_client with the metrics of an enabled model's engine (docs/metrics.md lists them).

        print(prometheus_client.generate_latest(hf_paged.metrics(model)).decode())
        prometheus_client.start_http_server(9090, registry=hf_paged.metrics(model))

    Counters are since the engine was made; histograms and ends of requests since the first call of this function for
    it, which nothing is paid for before. Where OpenTelemetry's SDK is installed, requests are also recorded as its
    `gen_ai.server` metrics, by the meter provider of the process.

    Args:
        model: an enabled model.
        registry: to add the metrics to, as ``prometheus_client.REGISTRY``; engines are told apart by the labels
            ``model_name`` and ``engine``. None: one of this engine's own, the same each time.

    Raises:
        ValueError: the model is not enabled.
        ImportError: prometheus_client is not installed (``pip install "hf-paged[metrics]"``).
    """
    return metrics_of(get_engine(model), registry)
