"""Watching a run: step times, metrics, sinks, live progress, the report. Floor 3: imports spec and events."""
