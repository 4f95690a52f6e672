"""Applies a Plan to a single-device model: mesh, parallelism along each axis, recompute, offload, compilation, and the executor."""
