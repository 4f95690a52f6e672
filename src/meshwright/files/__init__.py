"""Files that a crash cannot leave half-written, and locks on folders. Torch-free."""
