"""Pure decision functions: no input or output, no clock of their own; callers pass times and costs. Torch-free."""
