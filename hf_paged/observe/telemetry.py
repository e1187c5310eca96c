"""OpenTelemetry's metrics of generative-model servers, recorded if its SDK is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hf_paged.observe.histogram import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS
from hf_paged.outputs import Completion


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


def telemetry_of(model_name: str) -> Telemetry | None:
    """Return the telemetry of a model, or None if OpenTelemetry's SDK is not installed."""
    try:
        found = find_spec("opentelemetry.sdk.metrics")
    except ImportError:
        found = None
    return None if found is None else Telemetry(model_name)
