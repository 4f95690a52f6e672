"""Snapshots in host memory, those of other hosts too. Loads no torch, but for `tier`."""
