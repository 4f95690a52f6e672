"""Reads run, plan and profile files with the position of every value, checks and completes them."""
