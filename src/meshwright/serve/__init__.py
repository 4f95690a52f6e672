"""Inference engine: continuous batching over a paged key/value cache, with the trainer's modules and weights."""
