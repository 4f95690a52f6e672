"""Finds which ranks make a step slow, and why. Without torch."""
