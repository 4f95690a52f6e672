"""Observation of a run: step times, metrics, sinks, live progress, the report. Layer 3: imports spec and events."""
