"""Atomic, durable writes and renames, locks on folders, and the lease of a run's folder.

No other package calls fsync or rename.

Nothing here imports torch.
"""
