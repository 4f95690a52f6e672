"""What a plan costs, in closed form. Torch-free."""
