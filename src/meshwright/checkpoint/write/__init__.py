"""Writes checkpoints: layout, snapshots, the one writer of files, and the commit."""
