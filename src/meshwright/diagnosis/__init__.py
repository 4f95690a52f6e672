"""Diagnosis of slow steps: which rank and which cause. Layer 3: no torch."""
