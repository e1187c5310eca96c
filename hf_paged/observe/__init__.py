"""What watches an engine: metrics, telemetry, traces."""
