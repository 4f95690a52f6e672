"""What a checkpoint is on disk: files, manifest, contents, and what a run has of them. Loads no torch."""
