"""Observers of an engine: metrics, telemetry, traces."""
