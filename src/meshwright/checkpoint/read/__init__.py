"""Reads checkpoints into tensors: on ranks of any layout, or by rows in one process."""
