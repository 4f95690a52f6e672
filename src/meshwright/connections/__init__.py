"""What all listeners share: limits of connections, accepting connections, and mutual proof of a key.

This module imports no torch.
"""
