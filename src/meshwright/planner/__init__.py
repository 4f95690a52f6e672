"""Choosing a plan. Torch-free."""
