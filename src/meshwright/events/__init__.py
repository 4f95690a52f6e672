"""Events, with the same terms for predicted and measured timelines. Layer 1: imports only spec, and no torch."""
