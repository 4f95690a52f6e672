"""What everything that listens shares: limits of connections, accepting them, and mutual proof of a key. Torch-free."""
