"""Simulation of schedules and plans: predicted timelines. Layer 2: no torch."""
