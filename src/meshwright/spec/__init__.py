"""Descriptions of model, cluster, job and plan. Floor 0: imports nothing of the house, and no torch."""
