"""Fault injection: runs a short training job, disturbs it from outside, and checks what the project promises."""
