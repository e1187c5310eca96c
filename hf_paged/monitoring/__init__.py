"""What an engine does, as metrics for Prometheus and OpenTelemetry."""
