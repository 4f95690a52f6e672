"""Costs of a plan, in closed form. Torch-free."""
