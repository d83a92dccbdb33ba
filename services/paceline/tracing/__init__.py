"""Spans from this process to wherever they are looked at. Only this package imports OpenTelemetry,
and only once a process really traces."""
