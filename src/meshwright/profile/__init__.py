"""Measures the machine that it runs on: matrix products, attention, memory, links, and their interference."""
