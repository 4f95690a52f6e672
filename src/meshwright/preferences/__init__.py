"""Learning from preferences: losses of good and bad answers, the reference that they compare with, and their figures."""
