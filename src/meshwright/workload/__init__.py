"""Workload of the engine under a plan, without torch: tensors in memory, matmuls and messages."""
