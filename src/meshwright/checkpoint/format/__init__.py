"""The format of a checkpoint on disk: its files, manifest and contents, and the inventory of a run's checkpoints.

Nothing here loads torch.
"""
