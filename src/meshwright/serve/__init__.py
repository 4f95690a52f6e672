"""Inference engine: continuous batching over a paged KV cache. It uses the trainer's modules and weights."""
