"""Snapshots of checkpoints in host memory: of the own host's ranks, and copies for another host.

Only the module `tier` loads torch.
"""
