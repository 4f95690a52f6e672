"""Durable state of a run: it is written, committed, verified, and read back in any layout; also Hugging Face folders. Loads no torch."""
