"""Costs of a plan in closed form: seconds of a training step, and of a step of the inference engine. Without torch."""
