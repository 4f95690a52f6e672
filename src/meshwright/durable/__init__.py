"""Atomic, durable writes and renames, locks on folders, and the lease of a run's folder. Without torch.

No other package calls fsync or rename.
"""
