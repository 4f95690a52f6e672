"""Corpora, tokenizing, packing and order. Floor 1: imports spec only, and torch only in `loader`, where tensors are
made.
"""
