"""Chooses a plan for a training run, or a deployment for serving. Without torch."""
