"""What a plan makes each rank compute, send and store, without times."""
