"""Tensors of training state on a rank: their names, the positions of a rank's pieces in them, and their memory."""
