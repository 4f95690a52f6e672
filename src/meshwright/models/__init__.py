"""What a model computes, as plain one-device PyTorch, and what Hugging Face calls its parts.

Floor 1: imports `spec` and `kernels`.
`families` and what it stands on need no torch.
"""
