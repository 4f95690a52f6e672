"""Decisions as pure functions, without input, output or a clock: callers pass times and costs. Without torch."""
