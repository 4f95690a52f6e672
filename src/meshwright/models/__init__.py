"""Models as single-device PyTorch. Layer 1: imports `spec` and `kernels`."""
