"""The tensors of training state that a rank holds: what they are called, where in the whole their pieces lie, and in which memory."""
