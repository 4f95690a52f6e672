"""Reads run, plan, profile and other files. Every value keeps its position in the file. Checks and completes the values."""
