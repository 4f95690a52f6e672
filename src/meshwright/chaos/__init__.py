"""Fault injection: runs a short training job, disturbs it from outside, and checks the system's promises."""
