"""Optimizers that know shards, gradient clipping, and learning-rate schedules."""
