"""Models as PyTorch modules for a single device. Layer 1: imports `spec` and `kernels` only."""
