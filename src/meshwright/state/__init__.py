"""Tensors of training state on a rank: their names, the position of their pieces in the whole, and their memory."""
