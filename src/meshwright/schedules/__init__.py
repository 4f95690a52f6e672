"""Pipeline schedules as lists of actions, built by pure functions. Layer 1: imports spec only, no torch."""
