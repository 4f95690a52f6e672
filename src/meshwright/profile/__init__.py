"""Measures the machine on which it runs: matmuls, attention, memory, links, and how much they slow each other down."""
