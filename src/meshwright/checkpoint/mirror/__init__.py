"""Copies of checkpoints in an object store. Nothing here loads torch."""
