"""Optimizers of sharded parameters, gradient clipping, and learning-rate schedules."""
