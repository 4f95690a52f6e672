"""Copies of checkpoints in an object store. Loads no torch."""
