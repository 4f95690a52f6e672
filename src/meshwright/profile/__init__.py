"""Measures the machine it runs on: matrix products, attention, memory, links, and how they disturb one another."""
