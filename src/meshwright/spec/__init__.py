"""Descriptions of model, cluster, job and plan. Layer 0: imports no other package and no torch."""
