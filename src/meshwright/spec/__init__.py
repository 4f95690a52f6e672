"""Descriptions of model, cluster, job and plan. They import no other package and no torch."""
