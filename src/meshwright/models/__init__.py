"""Models as single-device PyTorch, and their tensor names and configurations in Hugging Face folders.

Layer 1: imports `spec` and `kernels`. `families` and the modules that it imports need no torch.
"""
