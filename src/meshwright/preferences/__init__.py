"""Learning from preferences: losses of good and bad answers, the reference model's log-probabilities, and figures per step."""
