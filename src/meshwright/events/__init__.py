"""Events: predicted and measured timelines use the same terms. Layer 1: imports only spec, and no torch."""
