"""What applies a Plan to a model from outside: the mesh, FSDP, recompute, compilation."""
