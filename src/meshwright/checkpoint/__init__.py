"""Durable state: written, committed, verified, read back in any layout; and Hugging Face folders. Loads no torch."""
