"""Writes checkpoints: assigns tensors to ranks, takes snapshots, writes the files in a separate process, and commits."""
