"""Starting a run: this machine's devices, the run's folder and plan, and the processes of its ranks.

This module imports no torch.
"""
