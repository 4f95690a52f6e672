"""Measures the machine that it runs on: matmuls, attention, memory, links, and their interference."""
