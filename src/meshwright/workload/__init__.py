"""Facts of the engine, without torch: what a plan makes it keep, compute and send."""
