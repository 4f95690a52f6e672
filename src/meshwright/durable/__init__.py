"""Atomic, durable writes and renames, and locks on folders. No other package calls fsync or rename. Torch-free."""
