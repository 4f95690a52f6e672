"""Corpora, tokenisation, packing and the order of samples. Layer 1: imports only `spec`.

Torch is imported only in `loader`, which makes tensors.
"""
