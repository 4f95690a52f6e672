"""Applies a Plan to a single-device model: mesh, parallelism, recompute, offload, compilation, and the schedule's executor."""
