"""Observation of a run: step times, metrics, sinks, live progress, the report. Layer 3: it imports spec and events."""
