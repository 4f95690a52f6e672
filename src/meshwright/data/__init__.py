"""Corpora, tokenizing, packing and sample order. Layer 1: imports spec only.
Torch is imported only in `loader`, which makes tensors."""
